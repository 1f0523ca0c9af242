# docker build -t pagedray:0.1.0-cpu .
# docker build -t pagedray:0.1.0-cuda --build-arg DEVICE=cuda .
# docker run -p 8000:8000 --shm-size 4g pagedray:0.1.0-cpu serve HuggingFaceTB/SmolLM2-360M-Instruct --host 0.0.0.0
#
# PyPI's torch brings CUDA, several GB of it. For a smaller CPU image give the index that PyTorch's page "Get started"
# names for CPUs: --build-arg TORCH_INDEX=URL
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm AS build
ARG DEVICE=cpu
ARG TORCH_INDEX=
RUN python -m venv /opt/pagedray
ENV PATH=/opt/pagedray/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pagedray pagedray
COPY kernels kernels
COPY scheduler scheduler
COPY workers workers
COPY cluster cluster
RUN case "$DEVICE" in cpu) what=".[trace]" ;; cuda) what=".[gpu,trace]" ;; \
        *) echo "DEVICE must be cpu or cuda" >&2; exit 1 ;; esac; \
    pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$what"

FROM python:${PYTHON}-slim-bookworm
# g++: the C++ kernels are built for the CPU that they find, and Triton links its launchers; wget: KubeRay's own probes
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home pagedray \
    && mkdir /models && chown pagedray /models
COPY --from=build /opt/pagedray /opt/pagedray
COPY k8s/image/drain.sh /usr/local/bin/drain
ENV PATH=/opt/pagedray/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /home/pagedray
EXPOSE 8000
ENTRYPOINT ["pagedray"]
CMD ["--help"]
