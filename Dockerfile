# The stable lane with its kernel, for a rented GPU (docs/quickstart.md): docker build -t cogumi .
# A volume mounted at /workspace hides what the image has there: cogumi is in /opt, and only caches, notebooks and runs go there.
ARG BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04
FROM ${BASE}

# Triton compiles its launcher with gcc and Python's headers when it first runs.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-dev python3-venv gcc libc6-dev bubblewrap ca-certificates git openssh-server rsync tmux \
    && rm -rf /var/lib/apt/lists/*

COPY . /opt/cogumi
RUN cd /opt/cogumi && LANE=stable PIP_NO_CACHE_DIR=1 sh requirements/install.sh

# cogumi keeps what Triton and torch compile below XDG_CACHE_HOME, by card and versions.
ENV PATH=/opt/cogumi/.venv/bin:${PATH} \
    HF_HOME=/workspace/.cache/huggingface \
    XDG_CACHE_HOME=/workspace/.cache
# A login by ssh has none of the variables above.
RUN env | grep -E '^(PATH|HF_HOME|XDG_CACHE_HOME)=' >>/etc/environment

WORKDIR /workspace
EXPOSE 22 8888
# sshd with the key in PUBLIC_KEY, if there is one, and JupyterLab with the token in JUPYTER_PASSWORD, or one that it prints.
CMD if [ -n "$PUBLIC_KEY" ]; then \
        mkdir -p -m 700 /root/.ssh /run/sshd && echo "$PUBLIC_KEY" >>/root/.ssh/authorized_keys && service ssh start; \
    fi; \
    if [ -n "$JUPYTER_PASSWORD" ]; then export JUPYTER_TOKEN="$JUPYTER_PASSWORD"; fi; \
    mkdir -p /workspace/notebooks && cp -n /opt/cogumi/notebooks/*.ipynb /workspace/notebooks/; \
    exec jupyter lab --allow-root --no-browser --ip=0.0.0.0 --port=8888 --ServerApp.root_dir=/workspace $JUPYTER_OPTIONS
