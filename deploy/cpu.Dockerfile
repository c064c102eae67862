# Router, scheduler, cache and workers with the llama.cpp engine, on a CPU: one image, one command for each service.
#
#   docker build -f deploy/cpu.Dockerfile -t headrace .
#   docker run -p 8080:8080 headrace                             # the whole mesh in one container
#   docker run headrace headrace scheduler --set scheduler.address=0.0.0.0:8082
#
# llama.cpp is compiled for the CPU that the image is built on; build where it will run, or set CMAKE_ARGS.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends curl build-essential cmake git patch \
    && rm -rf /var/lib/apt/lists/*
RUN curl -fsSL https://sh.rustup.rs | sh -s -- -y --profile minimal
ENV PATH=/root/.cargo/bin:$PATH
WORKDIR /src
# What changes seldom is built first, and kept.
COPY pyproject.toml ./
COPY .ci .ci
COPY deploy/llama.cpp deploy/llama.cpp
ARG CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=/src/deploy/llama.cpp/patch.cmake"
RUN python .ci/requirements.py > requirements.txt \
    && CMAKE_ARGS="${CMAKE_ARGS}" pip wheel --wheel-dir /wheels --constraint .ci/constraints.txt -r requirements.txt
COPY . .
RUN pip wheel --no-deps --wheel-dir /own .

FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home headrace
COPY --from=build /wheels /wheels
COPY --from=build /own /own
RUN pip install --no-cache-dir --no-index --find-links /wheels "$(ls /own/*.whl)[llama]" && rm -r /wheels /own
USER headrace
# Made once, so that a container starts in seconds.
RUN python -c "from headrace import models; models.prepare('embedded')"
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
CMD ["headrace", "up", "--set", "router.http_address=0.0.0.0:8080", "--set", "router.grpc_address=0.0.0.0:8081"]
