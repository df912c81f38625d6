#!/usr/bin/env bash
# Find chromium for the browser tests, or install Debian's where that is possible; without it those tests are skipped.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  command -v "$name" > /dev/null && exit 0
done
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } > /dev/null 2>&1 && exit 0
fi
echo "no chromium found: browser tests will be skipped (Debian: apt-get install chromium)" >&2
