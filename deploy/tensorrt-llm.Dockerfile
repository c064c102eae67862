# A worker with the tensorrt_llm engine, on NVIDIA's image, which brings TensorRT-LLM, CUDA and MPI.
#
#   docker build -f deploy/tensorrt-llm.Dockerfile --build-arg TENSORRT_LLM=IMAGE -t headrace-tensorrt-llm .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v /models:/models:ro headrace-tensorrt-llm \
#       headrace worker --config /models/mesh.toml
#
# IMAGE is NVIDIA's release image of TensorRT-LLM (tensorrt-llm/release in its catalogue) of a release that the engine knows,
# 1.2 to 1.4 (docs/engines.md). With another one the worker refuses to start, by name.
ARG TENSORRT_LLM

FROM ${TENSORRT_LLM} AS build
RUN apt-get update && apt-get install -y --no-install-recommends curl build-essential \
    && rm -rf /var/lib/apt/lists/*
RUN curl -fsSL https://sh.rustup.rs | sh -s -- -y --profile minimal
ENV PATH=/root/.cargo/bin:$PATH
WORKDIR /src
COPY . .
# Of the image's Python, so that the extension loads where TensorRT-LLM does.
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM ${TENSORRT_LLM}
COPY --from=build /wheels /wheels
# TensorRT-LLM's own pins stay as they are: only what is missing is added.
RUN pip install --no-cache-dir --upgrade-strategy only-if-needed /wheels/*.whl && rm -r /wheels
# Clients never reach a worker; routers do, and the scheduler's and cache's addresses are settings.
EXPOSE 8084 9084
HEALTHCHECK --interval=5s --start-period=3600s \
    CMD python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9084/health', timeout=3)"
STOPSIGNAL SIGTERM
CMD ["headrace", "worker", "--set", "worker.engine=tensorrt_llm", "--set", "worker.address=0.0.0.0:8084", \
     "--set", "worker.metrics_address=0.0.0.0:9084"]
