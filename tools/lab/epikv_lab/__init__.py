"""This project's own measuring and training. Installed in a checkout alone, by deploy/setup.sh."""
