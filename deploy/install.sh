#!/bin/sh
# Install this checkout with an extra into a virtual environment: sh deploy/install.sh .venv all
#
# uv resolves and downloads in parallel, and shows its progress. It compiles bytecode like pip: without, a program starts
# twice as slowly wherever Python may not write bytecode. It does not read pip's configuration, so an index,
# wheel folder or certificate that pip is configured with is passed on; variables of uv itself take precedence.
set -eu
bin=$1/bin extra=$2

[ -x "$bin/uv" ] || "$bin/python" -m pip install --quiet --disable-pip-version-check uv

configured=$("$bin/python" -m pip config list)
pip_setting() { printf '%s\n' "$configured" | sed -n "s/^.*\.$1='\(.*\)'\$/\1/p" | tail -n 1; }
pass_on() { # variable, value
    eval "given=\${$1:-}"
    [ -n "$given" ] || [ -z "$2" ] || export "$1=$2"
}
pass_on UV_DEFAULT_INDEX "$(pip_setting index-url)"
pass_on UV_INDEX "$(pip_setting extra-index-url)"
pass_on UV_FIND_LINKS "$(pip_setting find-links)"
pass_on SSL_CERT_FILE "$(pip_setting cert)"
pass_on UV_INDEX_STRATEGY unsafe-best-match # as pip: the newest version of all indexes

echo "installing openworld[$extra] into $1"
exec "$bin/uv" pip install --compile-bytecode --python "$bin/python" --editable ".[$extra]"
