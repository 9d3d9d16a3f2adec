# A service of the demo model, from Debian's packages and PyPI alone:
#
#     docker build -t polylora .
#     docker run --rm -p 8000:8000 --shm-size=5g -e POLYLORA_ADMIN_KEY polylora
#
# Settings, adapters and state come from outside (docs/how-to/operate.md): -v ./my.yaml:/srv/polylora/configs/serve.yaml,
# -v ./loras:/loras -e LORA_PATH=/loras, -v state:/var/lib/polylora, -v cache:/var/cache/polylora.
#
# The base image is named by its tag: its digest changes with Debian's security updates, and was not known where this file was
# written. To pin the one that you have checked: docker build --build-arg BASE=debian:bookworm-slim@sha256:...
ARG BASE=debian:bookworm-slim
FROM $BASE

RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates procps python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /srv/polylora
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY app app
COPY configs configs
COPY examples/adapters examples/adapters

# Packages must have the hashes of requirements.lock. EXTRAS=[cuda], [jax], [s3], [gs], [postgres]: what the settings need
# beside the CPU engine; these are not locked.
ARG EXTRAS=
RUN python3 -m venv /opt/polylora \
 && /opt/polylora/bin/pip install --no-cache-dir --require-hashes --requirement requirements.lock \
 && /opt/polylora/bin/pip install --no-cache-dir --no-build-isolation ".$EXTRAS"

RUN useradd --create-home --uid 10001 polylora \
 && install --directory --owner=polylora --mode=700 /var/lib/polylora /var/cache/polylora
# By number: Kubernetes cannot tell from a name that the user is not root (runAsNonRoot), and would not start it.
USER 10001
ENV PATH=/opt/polylora/bin:$PATH POLYLORA_STATE_DIR=/var/lib/polylora POLYLORA_CACHE=/var/cache/polylora
VOLUME ["/var/lib/polylora", "/var/cache/polylora"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
  CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
STOPSIGNAL SIGTERM
CMD ["polylora", "serve", "--config", "configs/serve.yaml", "--host", "0.0.0.0"]
