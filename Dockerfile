# The one image of the product. The base needs Python >= 3.11 with its venv module.
ARG BASE=docker.io/library/python:3.13-slim

FROM ${BASE} AS build
ENV PIP_CONFIG_FILE=/run/secrets/pip_conf PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
# Optional secrets, so that pip follows the settings of the building machine and nothing of them
# stays in a layer: pip_conf (a pip.conf) and ca_bundle (PEM certificates).
#
# pip lives in an environment of its own and installs into the product's. The build backend comes
# from the development requirements, with their hashes: the isolated build that pip would make by
# itself fetches one without.
COPY requirements requirements
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    if [ -f /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi; \
    python3 -m venv /opt/builder && python3 -m venv --without-pip /opt/agentjobs \
    && echo /opt/agentjobs/package > "$(echo /opt/agentjobs/lib/python3*/site-packages)/package.pth" \
    && /opt/builder/bin/pip --python /opt/agentjobs/bin/python \
        install --require-hashes -r requirements/operator.txt \
    && sed -nE '/^(hatchling|packaging|pathspec|pluggy|tomlkit|trove-classifiers)==/,/[^\\]$/p' \
        requirements/dev.txt > /tmp/backend.txt \
    && /opt/builder/bin/pip install --require-hashes -r /tmp/backend.txt

# The package itself goes to a folder beside its dependencies, and so into a small layer.
FROM build AS package
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
RUN PATH=/opt/builder/bin:$PATH hatchling build -t wheel -d /dist \
    && /opt/builder/bin/pip install --no-deps --no-index --target /package /dist/*.whl

FROM ${BASE}
# Some libraries ask for the user's name, so the number needs one.
RUN echo 'agentjobs:x:65532:65532::/nonexistent:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'agentjobs:x:65532:' >> /etc/group
COPY --from=build /opt/agentjobs /opt/agentjobs
# PYTHONSAFEPATH keeps the working directory out of the import path. Bytecode was compiled at
# build time; the root file system may be read-only.
ENV PATH=/opt/agentjobs/bin:$PATH \
    PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["python3", "-m", "agentjobs.main"]
CMD ["operator"]
COPY --from=package /package /opt/agentjobs/package
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="agentjobs" \
      org.opencontainers.image.description="Long tool runs of AI agents as Kubernetes jobs with a handle" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
