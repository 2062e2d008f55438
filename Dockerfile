# Burstline itself: the load generator, the embedded engine and the reports; no engine for GPUs is in here.
#
#   docker build -t burstline:local .
#   docker run --rm -v "$PWD/runs:/runs" --user "$(id -u):$(id -g)" burstline:local run
#
# The folder ./runs must be there and be yours: a daemon makes it root's. With --read-only, add --tmpfs /tmp.
# Behind a proxy that signs with a certificate of its own, name a file with it (PEM) inside this folder:
#   docker build --build-arg CA_BUNDLE=my-ca.pem -t burstline:local .
FROM python:3.11-slim-bookworm AS dependencies
ARG CA_BUNDLE=
WORKDIR /src
COPY pyproject.toml ${CA_BUNDLE} ./
# Two environments: what Burstline needs, in a layer that an edited source leaves as it is, and what builds its wheel.
RUN if [ -n "$CA_BUNDLE" ]; then export PIP_CERT="/src/${CA_BUNDLE##*/}"; fi \
    && needs() { python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))$1, sep='\n')"; } \
    && needs "['project']['dependencies']" >needed.txt \
    && needs "['build-system']['requires']" >build.txt \
    && python3 -m venv --without-pip /opt/burstline \
    && python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --quiet -r build.txt \
    && /opt/build/bin/pip --python /opt/burstline/bin/python install --no-cache-dir --quiet -r needed.txt \
    && find /opt/burstline -type d -name tests -prune -exec rm -rf {} +

FROM dependencies AS build
COPY README.md LICENSE ./
COPY burstline burstline
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir /opt/dist . \
    && /opt/build/bin/pip --python /opt/burstline/bin/python install --quiet \
        --no-deps --no-index --prefix /opt/wheel /opt/dist/*.whl

FROM python:3.11-slim-bookworm
# What a run generates for a server, writable for any user: Docker gives the mode to the volume that is mounted there.
RUN useradd --create-home --uid 1000 burstline && mkdir -m 0777 /generated
COPY --from=dependencies /opt/burstline /opt/burstline
RUN echo /opt/wheel/lib/python3.11/site-packages >/opt/burstline/lib/python3.11/site-packages/burstline.pth
COPY --from=build /opt/wheel /opt/wheel
COPY scripts/prepare-model.sh /usr/local/bin/
ARG REVISION=
LABEL org.opencontainers.image.title=Burstline \
    org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.revision=${REVISION}
# Results go to /runs, relative paths too; all else that is written at run time goes to /tmp.
ENV PATH=/opt/wheel/bin:/opt/burstline/bin:$PATH PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp/matplotlib HF_HUB_OFFLINE=1 \
    BURSTLINE_COMMIT=${REVISION} BURSTLINE_IN_IMAGE=1
USER burstline
WORKDIR /
ENTRYPOINT ["burstline"]
CMD ["--help"]
