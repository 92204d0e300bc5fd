# The image of `trimaran launch --on k8s` and of compose.yaml: what `pip install` of the wheel gives, and nothing else.
#   docker build -t REGISTRY/trimaran:0.2.0 .
# For GPUs, name a torch of your CUDA version: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY docs ./docs
RUN python -m pip install --no-cache-dir build && python -m build --wheel --outdir /wheels .

FROM python:${PYTHON}-slim
LABEL org.opencontainers.image.title="trimaran" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" --constraint /tmp/constraints.txt /wheels/*.whl \
    && rm /tmp/constraints.txt \
    && groupadd --gid 1000 trimaran \
    && useradd --uid 1000 --gid 1000 --create-home trimaran \
    && install --directory --owner=1000 --group=1000 /runs
USER 1000:1000
WORKDIR /runs
# Exec form: signals of the container runtime reach the program itself.
ENTRYPOINT ["trimaran"]
