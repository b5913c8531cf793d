#!/bin/sh
# JupyterLab of .venv on the quickstart, as `make lab` starts it. Further words go to JupyterLab: sh notebooks/lab.sh --port 8890
# As root, which rented boxes are, it opens no browser and prints the address to open.
set -eu
cd "$(dirname "$0")/.."
as_root=
if [ "$(id -u)" = 0 ]; then
    as_root="--allow-root --no-browser"
    echo "Open the address that JupyterLab prints below. For a box: ssh -p PORT root@HOST -L 8888:localhost:8888, with the port of the address."
fi
exec .venv/bin/python -m jupyterlab $as_root --ServerApp.root_dir="$PWD" \
    --LabApp.default_url=/lab/tree/notebooks/00_quickstart.ipynb "$@"
