# vLLM's image with shardboot as its entrypoint:
#
#   docker build --tag shardboot .
#   podman build --format docker --tag shardboot .      (podman's own format has no HEALTHCHECK)
#
# Any image with a `vllm` on PATH will do, a CPU build's, too: --build-arg VLLM_IMAGE=…
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${VLLM_IMAGE} AS wheel
ARG SOURCE_DATE_EPOCH=0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY entrypoint entrypoint
# With the setuptools that vLLM itself needs, so that nothing is downloaded. Equal sources, equal bytes:
# neither times nor modes of a checkout count.
RUN chmod -R u=rwX,go=rX . \
    && python3 -m pip wheel --no-cache-dir --disable-pip-version-check \
        --no-build-isolation --no-deps --wheel-dir /wheels .

FROM ${VLLM_IMAGE}
# Equal sources, equal layers, if the builder sets the times of files (docs/containers.md): for useradd
# it is the day of the password, and to pip it says that bytecode goes by no time.
ARG SOURCE_DATE_EPOCH=0
# vLLM's own image has this user. Who is never root, but in group 0, may write to the volume as well.
# A hub cache is mounted in root's home, as vLLM's own image has it: whoever knows its path gets there.
RUN if ! getent passwd 2000; then useradd --no-log-init --create-home --uid 2000 vllm; fi \
    && install --directory --owner=2000 --group=0 --mode=0775 /var/lib/shardboot \
    && chmod o+x /root

# Extras of pyproject.toml, such as `objects` for buckets.
ARG EXTRAS=
# Into the Python behind `vllm`, whose plugins it must be one of. The bytecode does not go by the
# time of its source, which some builders set back. What else has none there gets it, too: only root
# could write it later, and without it each of vLLM's processes takes 2.5 times as long to import. But
# that is checked against its source: an image on top of this one may change it. Files that are no
# Python, as templates, are said and do without; a file that cannot be written ends the build.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python="$(sed -n '1s/^#!//p' "$(command -v vllm)")" \
    && "$python" -m pip install --no-cache-dir --disable-pip-version-check \
        --root-user-action=ignore "$(echo /wheels/*.whl)${EXTRAS:+[$EXTRAS]}" \
    && package="$("$python" -I -c 'import entrypoint; print(entrypoint.__path__[0])')" \
    && { said="$("$python" -W ignore -m compileall -q -j 0 --invalidation-mode checked-hash \
        "$(dirname "$package")" 2>&1)" || echo "$said"; } \
    && case "$said" in *'Error: [Errno '*|*'Traceback (most'*) exit 1 ;; esac \
    && "$python" -m compileall -q -f --invalidation-mode unchecked-hash "$package" \
    && shardboot --version

ARG VLLM_IMAGE
LABEL org.opencontainers.image.title="shardboot" \
    org.opencontainers.image.description="vLLM, started from local, verified, pre-sharded checkpoints" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.base.name="${VLLM_IMAGE}"

# As root it makes the volume ready and is this user from then on; started as anyone else, it stays that.
ENV SHARDBOOT_USER=2000:2000
VOLUME /var/lib/shardboot
HEALTHCHECK --start-period=3h --interval=10s --timeout=10s CMD ["shardboot", "health"]
ENTRYPOINT ["shardboot", "enter"]
