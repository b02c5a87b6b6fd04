#!/bin/sh
# `make system`: install a browser, Prometheus, nginx, Redis with Sentinel and buildah from Debian's packages, for the tests that need them.
# Never fails: without them these tests are skipped, with a message. Silent when nothing is missing.
set -u

missing() { # prints the packages whose commands are missing
    command -v chromium >/dev/null || printf 'chromium '
    { command -v prometheus && command -v promtool; } >/dev/null || printf 'prometheus '
    PATH=$PATH:${SBIN:-/usr/sbin} command -v nginx >/dev/null || printf 'nginx '
    command -v redis-server >/dev/null || printf 'redis-server '
    command -v redis-sentinel >/dev/null || printf 'redis-sentinel '
    command -v buildah >/dev/null || printf 'buildah '
    command -v mmdebstrap >/dev/null || printf 'mmdebstrap '
}

# Packages start their services when they are installed. The tests need only the programs.
policy=${POLICY_RC_D:-/usr/sbin/policy-rc.d}
forbid_services() {
    [ -e "$policy" ] && return
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
}

packages=$(missing)
[ -z "$packages" ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing for the tests: $packages"
    forbid_services
    export DEBIAN_FRONTEND=noninteractive
    # Fail fast when offline; wait while another apt-get holds the lock.
    apt="apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=120"
    # shellcheck disable=SC2086  # both are lists
    $apt update >/dev/null 2>&1
    # shellcheck disable=SC2086
    output=$($apt install -y --no-install-recommends $packages 2>&1) || printf '%s\n' "$output" | tail -n 3
    for package in $packages; do
        [ "$package" = chromium ] || systemctl disable --quiet "$package" >/dev/null 2>&1
    done
fi

packages=$(missing)
if [ -n "$packages" ]; then
    echo "not installed: ${packages% }. The tests that need it are skipped. To install it on Debian:"
    echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages% }"
fi
exit 0
