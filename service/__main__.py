"""Run the service: `python -m service`. Its flags are in `service.app.Config`."""

from common import cli
from service.app import Config, main

if __name__ == "__main__":
    cli.run(main, cli.parse(Config))
