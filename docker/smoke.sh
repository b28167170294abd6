#!/usr/bin/env bash
# Asserts that a running server streams a completion. Usage: smoke.sh [host:port of its HTTP endpoint]
set -euo pipefail
url=${1:-localhost:8000}
body='{"text_input": "def add(a, b):", "stream": true, "max_tokens": 24, "temperature": 0, "ignore_eos": true}'

reply=$(curl -fsSN --max-time "${KIMI_SMOKE_TIMEOUT_S:-120}" -d "$body" \
  "http://$url/v2/models/spec_ensemble/generate_stream") || {
  echo "FAIL: no completion from $url" >&2
  exit 1
}
num_events=$(grep -c '^data: ' <<<"$reply" || true)
last=$(grep '^data: ' <<<"$reply" | tail -n 1)

expect() { # expect WHAT TEXT PATTERN
  grep -qE "$3" <<<"$2" || {
    printf 'FAIL: %s. The reply was:\n%s\n' "$1" "$reply" >&2
    exit 1
  }
}
[ "$num_events" -ge 2 ] || expect "a stream of several events was expected, $num_events came" "" "never"
expect "no event may be an error" "$(grep -vc '"error"' <<<"$reply")" '^[1-9]'
expect "the last event says why it ended" "$last" '"finish_reason":"length"'
expect "the last event carries the statistics" "$last" '"statistics":"\{.*num_output_tokens\\": ?24'
expect "text came" "$reply" '"text_output":"[^"]'
echo "PASS: $num_events events, 24 tokens from $url"
