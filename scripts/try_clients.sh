#!/usr/bin/env bash
# Serves kimi-nano and runs each client of scripts/clients.txt, and perf_analyzer, against it: a table on standard output.
# The clients get a virtual environment of their own: CLIENTS (default .venv-clients), 1.5 GB. Exit code 1: one failed.
set -euo pipefail
cd "$(dirname "$0")/.."
clients=${CLIENTS:-.venv-clients}
venv=${VENV:-.venv}

if ! cmp -s scripts/clients.txt "$clients/installed.txt"; then
    "$venv/bin/python" -m venv "$clients"
    "$clients/bin/python" -m pip install --quiet --requirement scripts/clients.txt
    cp scripts/clients.txt "$clients/installed.txt"
fi
VENV=$venv ./scripts/get_perf_analyzer.sh > /dev/null

work=$(mktemp -d)
read -r grpc http metrics openai < <("$venv/bin/python" -c '
import socket
taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(each.getsockname()[1] for each in taken))')
"$venv/bin/kimi" serve --checkpoint demo/kimi-nano --draft demo/kimi-nano/draft --log-file "$work/server.log" \
    --grpc-port "$grpc" --http-port "$http" --metrics-port "$metrics" --openai-port "$openai" 2> "$work/serve.txt" &
server=$!
trap 'kill "$server" 2> /dev/null; wait "$server" 2> /dev/null; rm -rf "$work"' EXIT
until "$venv/bin/kimi" health --url "localhost:$http" --draft 2> /dev/null >&2; do
    kill -0 "$server" 2> /dev/null || { cat "$work/serve.txt" >&2; exit 1; }
    sleep 1
done
# perf_analyzer of this project's own environment comes first: the one that genai-perf brings needs glibc 2.38.
PATH=$(cd "$venv/bin" && pwd):$PATH "$clients/bin/python" scripts/try_clients.py \
    --grpc "localhost:$grpc" --openai "http://localhost:$openai" --work "$work" "$@"
