"""Run the service: `python -m apps.service`. Its flags are in `apps.service.app.Config`."""

from apps.service.app import Config, main
from common import cli

if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
