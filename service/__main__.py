"""`python -m service`: run the service; its flags are in `service.app.Config`."""

from common import cli
from service.app import Config, main

if __name__ == "__main__":
    cli.run(main, Config)
