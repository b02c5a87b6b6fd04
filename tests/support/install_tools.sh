#!/bin/sh
# `make system`: a real browser and a real Prometheus for the tests that need one, from Debian's packages.
# Never fails, for without them those tests are skipped and say so. Silent when everything is there.
set -u

missing() { # the packages whose commands are not there
    command -v chromium >/dev/null || printf 'chromium '
    { command -v prometheus && command -v promtool; } >/dev/null || printf 'prometheus '
}

# Packages start their services when they are installed. The tests want the programs only.
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
    # Offline it should be known soon, and next to another apt-get it is worth waiting.
    apt="apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=120"
    # shellcheck disable=SC2086  # both are lists
    $apt update >/dev/null 2>&1
    # shellcheck disable=SC2086
    output=$($apt install -y --no-install-recommends $packages 2>&1) || printf '%s\n' "$output" | tail -n 3
    case $packages in *prometheus*) systemctl disable --quiet prometheus >/dev/null 2>&1 ;; esac
fi

packages=$(missing)
if [ -n "$packages" ]; then
    echo "not installed: ${packages% }. The tests that need it are skipped; on Debian this would help:"
    echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages% }"
fi
exit 0
