#!/bin/sh
# Build the images of the Dockerfile with buildah: no Docker engine and no registry are needed.
#
#   sh deploy/images.sh server             # or: trainer, or both; as root
#   sh deploy/images.sh --remove           # remove all images of this script
#
# The base image is made of Debian's packages by mmdebstrap, unless BASE names another one. Variables:
#   IMAGES          folder with the images and the cache of packages, default .images
#   IMAGE_TAG       tag of the images, default local
#   ONNX_RUNTIME    onnxruntime (default: CPU), or onnxruntime-gpu[cuda,cudnn]
#   BASE            an image with Debian's tools and Python 3.11 or newer: docker.io/library/python:3.11-slim-bookworm
#   MIRROR          mirror of Debian for mmdebstrap
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL    package indexes, without credentials
#   CERTIFICATES    trusted while packages are downloaded, default those of this machine; not part of the images
set -eu

fail() { printf '%s\n' "$1" >&2; exit 1; }
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }

# An own store with its own cache of packages, so that it can be removed as a whole. buildah chooses the driver: overlay,
# or vfs where the kernel does not support that.
in_store() {
    TMPDIR=$images/tmp buildah ${STORAGE_DRIVER:+--storage-driver "$STORAGE_DRIVER"} \
        --root "$images/storage" --runroot "$images/run" "$@"
}

# Debian with Python and pip, under the names that the official Python images use.
make_base() {
    command -v mmdebstrap >/dev/null || fail "mmdebstrap is missing: apt-get install mmdebstrap, or set BASE"
    root=$images/base started=$(date +%s)
    rm -rf "$root"
    # With merged folders from the start, and so without usrmerge, which depends on Perl.
    mmdebstrap --mode=root --variant=apt --include=python3,python3-pip,ca-certificates,usr-is-merged \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --dpkgopt=path-exclude='/usr/share/man/*' --dpkgopt=path-exclude='/usr/share/doc/*' \
        --dpkgopt=path-exclude='/usr/share/locale/*' --aptopt='Acquire::Languages "none"' \
        bookworm "$root" ${MIRROR:+"$MIRROR"} >"$images/base.log" 2>&1 \
        || { tail -n 5 "$images/base.log" >&2; fail "the base image was not made: see $images/base.log"; }
    rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
    ln -sf python3 "$root/usr/bin/python"
    container=$(in_store from scratch)
    in_store add --quiet "$container" "$root" / >/dev/null
    in_store commit --quiet --rm --format docker "$container" "$base" >/dev/null
    rm -rf "$root"
    report "$base" "$started"
}

report() { # image, time of start
    echo "built $1: $(in_store images --format '{{.Size}}' "$1"), $(($(date +%s) - $2)) s"
}

build() { # target
    name=localhost/openworld-$1:${IMAGE_TAG:-local} log=$images/$1.log started=$(date +%s)
    # --format docker: the OCI format has no HEALTHCHECK. chroot: no container runtime is needed.
    set -- --layers --isolation chroot --network host --format docker --target "$1" --tag "$name" \
        --build-arg "BASE=$base" --build-arg "ONNX_RUNTIME=${ONNX_RUNTIME:-onnxruntime}"
    [ -z "${PIP_INDEX_URL:-}" ] || set -- "$@" --build-arg "PIP_INDEX_URL=$PIP_INDEX_URL"
    [ -z "${PIP_EXTRA_INDEX_URL:-}" ] || set -- "$@" --build-arg "PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL"
    [ ! -e "$certificates" ] || set -- "$@" --volume "$certificates:/etc/ssl/certs/ca-certificates.crt:ro"
    in_store bud "$@" . >"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "the image \"$name\" was not built: see $log"; }
    report "$name" "$started"
}

[ $# -gt 0 ] || { usage >&2; exit 2; }
for word in "$@"; do
    case $word in
    -h | --help) usage; exit 0 ;;
    server | trainer | --remove) ;;
    *) fail "unknown image \"$word\": there are server and trainer" ;;
    esac
done
command -v buildah >/dev/null || fail "buildah is missing: apt-get install buildah"
[ "$(id -u)" = 0 ] || fail "building needs root: sudo sh deploy/images.sh $*"

cd "$(dirname "$0")/.."
certificates=${CERTIFICATES:-/etc/ssl/certs/ca-certificates.crt}
base=${BASE:-localhost/openworld-base:bookworm}
mkdir -p "${IMAGES:=.images}"
images=$(cd "$IMAGES" && pwd)
mkdir -p "$images/tmp"

if [ "$1" = --remove ]; then
    in_store rm --all >/dev/null && in_store rmi --all --force >/dev/null && rm -rf "$images"
    exit
fi
[ -n "${BASE:-}" ] || in_store inspect --type image "$base" >/dev/null 2>&1 || make_base
for target in "$@"; do
    build "$target"
done
