# The daemon in an image without compilers, Python or CUDA: README.md, "In a container".
# tests/container.sh builds it without a Docker engine and tries it.
#
# Secrets that a build behind a proxy or a mirror may give, and that stay out of the image:
#   --secret id=pip.conf,src=FILE   pip's configuration
#   --secret id=ca.pem,src=FILE     certificates to trust, for `cert = /run/secrets/ca.pem` in it
#
# Debian's packages are signed, which apt checks, and what pip fetches has its hash in tools/requirements. The base is
# what its tag names today: BASE=docker.io/library/debian@sha256:... pins it.

ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS system
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      libabsl20220623 libgrpc++1.51 libmimalloc2.0 libpcre2-8-0 libpq5 libprometheus-cpp-core1.0 \
      libprometheus-cpp-pull1.0 libprotobuf32 libsqlite3-0 libssl3 libstdc++6 libutf8proc2 zlib1g \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent \
      --shell /usr/sbin/nologin epikv

FROM ${BASE} AS toolchain
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates ccache cmake g++ libabsl-dev libboost-math1.81-dev libgrpc++-dev \
      libhwy-dev libmimalloc-dev libpcre2-dev libpq-dev libprotobuf-dev librandom123-dev libsqlite3-dev libssl-dev \
      libutf8proc-dev ninja-build \
      nlohmann-json3-dev pkg-config prometheus-cpp-dev protobuf-compiler protobuf-compiler-grpc \
      python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
# A CPU build of LibTorch. A CUDA build would link CUDA's libraries, which are not here. The index is PyTorch's, or
# another with the same wheel.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,source=tools/requirements,target=/tmp/requirements \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /tmp/pip \
 && /tmp/pip/bin/pip install --no-cache-dir --require-hashes --only-binary :all: --no-deps --target=/opt/python \
      --report=/opt/torch.json --index-url="${TORCH_INDEX}" -r /tmp/requirements/torch-cpu.txt \
 && ln -s /opt/python/torch /opt/libtorch && rm -r /tmp/pip \
 && if ldd /opt/libtorch/lib/libtorch_cpu.so | grep 'not found'; then \
      echo "TORCH_INDEX=${TORCH_INDEX} gave no CPU build of torch" >&2; exit 1; fi

# What is built from sources beside ours, with the build backend that pip insists on for the archive's metadata; and
# what writes the bill of materials.
RUN --mount=type=bind,source=tools/requirements,target=/tmp/requirements \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /tmp/pip && python3 -m venv /opt/sbom \
 && /tmp/pip/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /tmp/requirements/build.txt \
 && /tmp/pip/bin/pip download --no-cache-dir --require-hashes --no-deps --no-binary xgrammar --no-build-isolation \
      --dest=/opt -r /tmp/requirements/xgrammar.txt && rm -r /tmp/pip \
 && /opt/sbom/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /tmp/requirements/sbom.txt

FROM toolchain AS build
WORKDIR /src
COPY . .
ARG JOBS=2
ARG REVISION=unknown
RUN --mount=type=cache,target=/var/cache/ccache \
    export CCACHE_DIR=/var/cache/ccache EPIKV_TORCH_DIR=/opt/libtorch \
      EPIKV_XGRAMMAR_SDIST=$(echo /opt/xgrammar-*.tar.gz) \
 && cmake --preset release -DEPIKV_COMMIT="${REVISION}" && cmake --build --preset release -j "${JOBS}" --target epikvd epikv-probe
# What of LibTorch the daemon links, where it was linked, without symbols (a fifth of it).
RUN mkdir -p /image/usr/local/bin /image/opt/libtorch/lib /image/etc/epikv /image/models \
 && strip -o /image/usr/local/bin/epikvd build/release/server/epikvd \
 && strip -o /image/usr/local/bin/epikv-probe build/release/server/epikv-probe \
 && cp deploy/container.textproto /image/etc/epikv/epikvd.textproto \
 && ldd build/release/server/epikvd | awk '$3 ~ "^/opt/" { print $3 }' \
  | xargs cp -L -t /image/opt/libtorch/lib \
 && strip --strip-unneeded /image/opt/libtorch/lib/*
# Licences: ours, and of what no Debian package of the image brings. NOTICE names the rest.
RUN mkdir -p /image/usr/share/doc/epikvd/xgrammar \
 && cp LICENSE NOTICE /image/usr/share/doc/epikvd/ \
 && cp -r /opt/python/torch-*.dist-info/licenses /image/usr/share/doc/epikvd/libtorch \
 && cp build/release/xgrammar-*/LICENSE build/release/xgrammar-*/NOTICE /image/usr/share/doc/epikvd/xgrammar/

# What is in the image: Debian's packages, and what is linked or compiled in.
RUN --mount=type=bind,from=system,source=/,target=/system \
    /opt/sbom/bin/python deploy/sbom.py --root=/system --program=build/release/server/epikvd \
      --torch=/opt/torch.json --commit="${REVISION}" --out=/image/usr/share/doc/epikvd/sbom.cdx.json

# `--target gateway`: OpenAI's HTTP API in front of daemons, without a daemon. It has Python and nothing of LibTorch.
FROM ${BASE} AS python
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent \
      --shell /usr/sbin/nologin epikv

FROM python AS packages
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY CMakeLists.txt LICENSE NOTICE ./
COPY proto proto
COPY tools tools
# What generates the code of the protos is in an environment of its own, and stays out of the image.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /tmp/build \
 && /tmp/build/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r tools/requirements/wheel.txt \
 && /tmp/build/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir=/tmp/wheels ./tools \
 && python3 -m venv --without-pip /opt/epikv \
 && /tmp/build/bin/pip --python=/opt/epikv/bin/python install --no-cache-dir --require-hashes --only-binary :all: \
      -r tools/requirements/gateway.txt \
 && /tmp/build/bin/pip --python=/opt/epikv/bin/python install --no-index --no-deps /tmp/wheels/*.whl

FROM python AS gateway
ARG REVISION=unknown
LABEL org.opencontainers.image.title="epikv gateway" \
      org.opencontainers.image.description="OpenAI's HTTP API in front of epikvd" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=packages /opt/epikv /opt/epikv
COPY LICENSE NOTICE /usr/share/doc/epikv/
ENV PATH=/opt/epikv/bin:$PATH EPIKV_SERVER=epikvd:50051
RUN epikv gateway --help >/dev/null
USER 10001:10001
WORKDIR /
EXPOSE 8000/tcp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --retries=3 CMD ["python3", "-c", \
  "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["epikv", "gateway", "--listen=0.0.0.0:8000"]

FROM system AS runtime
ARG REVISION=unknown
LABEL org.opencontainers.image.title="epikvd" \
      org.opencontainers.image.description="Serves TorchScript models over gRPC, each request's KV cache held to a budget" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /image /
# A library that is missing ends the build here.
RUN epikvd --print_config --config=/etc/epikv/epikvd.textproto >/dev/null && epikv-probe --help >/dev/null
USER 10001:10001
WORKDIR /
# Threads that wait for work spin for less than a millisecond, which is from one product to the next,
# then sleep: to wake them for each costs more than it, and a container's CPU quota pays for spinning.
ENV GOMP_SPINCOUNT=10000
EXPOSE 50051/tcp 9464/tcp
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m --interval=10s --timeout=10s --retries=3 \
  CMD ["epikv-probe", "--config=/etc/epikv/epikvd.textproto"]
ENTRYPOINT ["epikvd", "--config=/etc/epikv/epikvd.textproto"]
