# Burstline itself: the load generator, the embedded engine and the reports; no engine for GPUs is in here.
#
#   docker build -t burstline .
#   docker run --rm -v "$PWD/runs:/runs" --user "$(id -u):$(id -g)" burstline run --out /runs
#
# Behind a proxy that signs with a certificate of its own, name a file with it (PEM) inside this folder:
#   docker build --build-arg CA_BUNDLE=my-ca.pem -t burstline .
FROM python:3.11-slim-bookworm AS build
ARG CA_BUNDLE=
WORKDIR /src
COPY pyproject.toml README.md LICENSE ${CA_BUNDLE} ./
# The dependencies first: a change to the source leaves this layer as it is.
RUN if [ -n "$CA_BUNDLE" ]; then export PIP_CERT="/src/${CA_BUNDLE##*/}"; fi \
    && python3 -m venv /opt/burstline \
    && python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        >requirements.txt \
    && /opt/burstline/bin/pip install --no-cache-dir --quiet -r requirements.txt
COPY burstline burstline
RUN if [ -n "$CA_BUNDLE" ]; then export PIP_CERT="/src/${CA_BUNDLE##*/}"; fi \
    && /opt/burstline/bin/pip install --no-cache-dir --quiet .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/burstline /opt/burstline
RUN useradd --create-home --uid 1000 burstline
USER burstline
# Any other user may run it too (docker run --user): what is written at run time goes to /tmp.
ENV PATH=/opt/burstline/bin:$PATH PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp/matplotlib HF_HUB_OFFLINE=1
WORKDIR /home/burstline
ENTRYPOINT ["burstline"]
CMD ["--help"]
