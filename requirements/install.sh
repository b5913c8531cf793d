#!/bin/sh
# Create .venv and install the lane that fits this machine's NVIDIA driver, or a CPU lane if there is no NVIDIA GPU.
# A GPU whose driver fails is an error; LANE=cpu installs a CPU lane all the same, LANE=stable that lane without asking the driver.
# `sh requirements/install.sh test` adds the tests' tools. Running it again brings .venv up to date.
# `sh requirements/install.sh vllm` makes .venv-vllm instead: the CPU lane, the tests' tools, and vLLM; `ecosystem` likewise. `stable` and
# `unsloth` take the stable lane's packages without a GPU.
set -eu
cd "$(dirname "$0")/.."
venv=.venv
case ${1:-} in stable | unsloth | vllm | ecosystem) venv=.venv-$1 ;; esac
cpu=requirements/cpu.txt
case ${1:-} in stable | unsloth) cpu=requirements/stable-cpu.txt ;; esac

# The kernel's signs of an NVIDIA GPU, which need none of the driver's tools (cogumi.stack.host.find_gpu_sign looks for the same).
find_gpu_sign() {
    for sign in /proc/driver/nvidia/version /dev/nvidiactl /dev/nvidia0; do
        [ ! -e "$sign" ] || return 0
    done
    for sign in /sys/bus/pci/devices/*; do
        ! grep -qs '^0x10de' "$sign/vendor" || ! grep -qs '^0x03' "$sign/class" || return 0
    done
    return 1
}

# The lane, before anything is made.
lane=cpu reason="no NVIDIA GPU"
if [ $venv != .venv ] || [ "${LANE:-}" = cpu ]; then
    reason="no GPU is to be used"
elif [ "${LANE:-}" = stable ]; then
    lane=stable driver="not asked, LANE=stable"  # an image is built where there is no GPU
elif answer=$(nvidia-smi -L 2>&1); then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
    major=${driver%%.*}
    case $major in
    '' | *[!0-9]*)
        echo "nvidia-smi calls the driver '$driver', which is no version: reboot the box, or choose another host." >&2
        exit 2
        ;;
    esac
    if [ "$major" -ge 580 ]; then
        lane=stable
    elif [ "$major" -ge 525 ] && [ -f requirements/stable-cu128.txt ]; then
        lane=stable-cu128
    else
        echo "NVIDIA driver $driver cannot run the stable lane (CUDA 13.0 needs 580 or newer), and no lane for older ones" \
            "fits (docs/stack.md): choose a host with driver 580 or newer." >&2
        exit 2
    fi
elif find_gpu_sign; then
    if command -v nvidia-smi >/dev/null; then
        echo "This machine has an NVIDIA GPU ($sign), but nvidia-smi fails: $(echo "$answer" | head -n 1)" >&2
        echo "Reboot the box or take another host; start a container with --gpus all. To train on the CPU all the same:" \
            "LANE=cpu sh requirements/install.sh${1:+ $1}" >&2
        exit 2
    fi
    reason="this machine has an NVIDIA GPU ($sign), but no nvidia-smi (a container has it with --gpus all)"
fi

# No pre-release: python3.11 of Ubuntu 22.04 is 3.11.0rc1, which cannot import a newer torch.
for python in ${PYTHON:-} python3.12 python3.11 python3 python .python/cpython-3.12*/bin/python3.12; do
    "$python" -c 'import sys; sys.exit(not (3, 11, 0, "final") <= sys.version_info < (3, 13))' 2>/dev/null && break
    python=
done
if [ -z "$python" ]; then
    # Into this directory, so that it stays where .venv stays.
    echo "cogumi needs Python 3.11 or 3.12, and this machine has $(python3 --version 2>/dev/null || echo none). This gets 3.12 and installs:" >&2
    echo "python3 -m pip install --target .python uv && .python/bin/uv python install --no-bin --install-dir .python 3.12 && sh requirements/install.sh${1:+ $1}" >&2
    echo "If you have one elsewhere: PYTHON=/path/to/python3.12 sh requirements/install.sh${1:+ $1}" >&2
    exit 2
fi

if ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf $venv
    if ! "$python" -m venv $venv; then
        rm -rf $venv
        echo "$python cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 2
    fi
    echo '*' >$venv/.gitignore
fi
install() { $venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes "$@"; }

missing=
case $lane in
stable)
    echo "NVIDIA driver $driver: installing the stable lane, CUDA 13.0 (about 2.9 GiB)"
    # One wheel is from PyTorch's own host: install it separately, so that the rest does not depend on that host.
    sed '/^xformers @/,/--hash/d' requirements-stable-precompiled.txt >$venv/without-xformers.txt
    sed -n '/^xformers @/,/--hash/p' requirements-stable-precompiled.txt >$venv/xformers.txt
    install --no-deps -r $venv/without-xformers.txt
    if ! install --no-deps --retries 1 -r $venv/xformers.txt 2>$venv/xformers.log; then
        echo "xformers cannot be had from PyTorch's index ($venv/xformers.log says why): without it, unsloth uses torch's attention"
        missing='requires xformers, which is not installed'
    fi
    ;;
stable-cu128)
    echo "NVIDIA driver $driver: installing the stable lane for CUDA 12.8 (about 3 GiB), torch from download.pytorch.org"
    install -r requirements/stable-cu128.txt
    ;;
cpu)
    echo "$reason: installing the CPU lane"
    # PyTorch's own index is asked for torch alone, so that a network without it costs one failed look-up, not 140.
    if [ "$(uname)" = Darwin ] || install --no-deps --retries 1 --index-url https://download.pytorch.org/whl/cpu \
        -r requirements/cpu-torch.txt 2>$venv/cpu-torch.log; then
        install -r $cpu
    elif [ $cpu = requirements/stable-cpu.txt ]; then
        echo "no CPU build of torch can be had here ($venv/cpu-torch.log says why), which this environment needs" >&2
        exit 2
    else
        echo "no CPU build of torch can be had here ($venv/cpu-torch.log says why):"
        echo "taking the index's build with its CUDA libraries (about 3 GiB)"
        install -r requirements/cpu-index-torch.txt
    fi
    ;;
esac
if [ "${1:-}" = test ]; then
    install -r requirements/test.txt
    [ "$(uname)" = Darwin ] || install --no-deps -r requirements/llama-cpp.txt
    # Liger declares Triton, which the CPU lane has not; its loss in PyTorch needs none. Apart, so that `pip check` holds.
    install --no-deps --upgrade --target $venv/oracles -r requirements/oracles.txt
    # The S3 server that the tests of the mirror start: botocore asks for an older python-dateutil than the lanes have.
    install --no-deps --upgrade --target $venv/s3-server -r requirements/s3-server.txt
fi
$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
case $lane in stable*) $venv/bin/python requirements/flash_attn.py $lane ;; esac
if [ $venv = .venv ]; then
    # The notebooks name this kernel: for the Jupyter of .venv wherever HOME is, and for any other Jupyter of this user.
    $venv/bin/python -m ipykernel install --sys-prefix --name cogumi --display-name cogumi >/dev/null
    $venv/bin/python -m ipykernel install --user --name cogumi --display-name cogumi ||
        echo "other Jupyters will not list the kernel cogumi; sh notebooks/lab.sh starts one that does"
fi
if [ $venv != .venv ]; then
    # Without dependencies, and so without `pip check`: requirements/*-cpu-overrides.in say which are left out.
    install -r requirements/test.txt
    case $1 in
    stable) ;;
    ecosystem) $venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/ecosystem.in ;;
    *) install --no-deps -r requirements/$1-cpu.txt ;;
    esac
elif [ -z "$missing" ]; then
    $venv/bin/python -m pip check
elif $venv/bin/python -m pip check | grep -v "$missing" | grep -v '^No broken'; then
    exit 1  # it complains of something else, which stands above
fi
