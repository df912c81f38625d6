# capi in a container. See docs/guides/scale.md; nothing here has been built where this project is tested.
#
#   docker build -t capi .
#   docker run --gpus all --shm-size 8g -v "$PWD:/work" capi pretrain vits16 --data photos --out runs/first
#
# torch's own wheels bring the CUDA libraries, so that the base needs Python alone and the host its driver (with NVIDIA's
# container toolkit). Another base with Python 3.11 or newer and pip, such as a CUDA runtime image of the maker, goes in by
# --build-arg BASE=...; torch without CUDA, a tenth of the size, by --build-arg TORCH_INDEX=... with the address of PyTorch's CPU wheels.
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG TORCH_INDEX=""
ARG EXTRAS=pictures,shards,parquet

RUN useradd --create-home --uid 1000 capi
WORKDIR /opt/capi
# In a layer of its own, so that another version of the code does not fetch gigabytes again.
COPY pyproject.toml ./
RUN python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" \
    > requirements.txt \
    && python -m pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements.txt
COPY README.md LICENSE ./
COPY capi ./capi
RUN python -m pip install --no-cache-dir ".[${EXTRAS}]"

# Runs belong to a user without rights; a mounted folder must be writable for uid 1000.
USER capi
WORKDIR /work
ENTRYPOINT ["python", "-m", "capi"]
CMD ["--help"]
