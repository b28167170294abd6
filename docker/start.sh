#!/usr/bin/env bash
# Starts the server and stops it cleanly. Its arguments go to Triton Server. Where `tritonserver` is on the PATH (the container) it is run as production
# needs it; elsewhere `kimi serve` runs the embedded one. Both read the KIMI_* variables of docs/settings.md, and these:
#   KIMI_HTTP_PORT, KIMI_GRPC_PORT, KIMI_METRICS_PORT   8000, 8001, 8002
#   KIMI_MODEL_REPOSITORY   folder of the four models; default: beside this script or one above
#   KIMI_ADMIN_SECRET       opens the admin APIs to requests with the header `kimi-admin`; default: a random one, nobody's
#   KIMI_SHM_REGION_BYTES   first size of each model's shared-memory region
#   KIMI_CUDA_POOL_BYTES    Triton Server's pool for GPU tensors, when KIMI_DEVICE is cuda
#   KIMI_TRITON_ARGS        more options of Triton Server, separated by blanks; so are this script's arguments
#   KIMI_EXIT_TIMEOUT_S     seconds, after the drain, that a stopping server waits for what it still counts as open
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
http_port=${KIMI_HTTP_PORT:-8000}
grpc_port=${KIMI_GRPC_PORT:-8001}
metrics_port=${KIMI_METRICS_PORT:-8002}

fail() {
  echo "start.sh: $1" >&2
  exit 2
}

[ -n "${KIMI_CHECKPOINT:-}" ] || fail "KIMI_CHECKPOINT is empty, the folder of a checkpoint is needed"
for folder in "$KIMI_CHECKPOINT" ${KIMI_DRAFT:+"$KIMI_DRAFT"}; do
  [ -f "$folder/config.json" ] || fail "$folder has no config.json: is the checkpoint mounted there?"
done

if ! command -v tritonserver >/dev/null; then
  kimi=$(command -v kimi || echo "$here/../.venv/bin/kimi")
  [ -x "$kimi" ] || fail "neither tritonserver nor kimi is on the PATH: run \`make setup\`, or use the container"
  exec "$kimi" serve --http-port="$http_port" --grpc-port="$grpc_port" --metrics-port="$metrics_port" -- "$@"
fi

models=(kimi_target spec_ensemble)
[ -z "${KIMI_DRAFT:-}" ] || models=(kimi_target eagle3_draft spec_ensemble)
[ "${KIMI_UNARY:-}" != true ] || models+=(spec_ensemble_unary)
region_bytes=${KIMI_SHM_REGION_BYTES:-33554432}
problem=$(python3 -m kimi_backend.hosting.shared_memory "${#models[@]}" "$region_bytes") || fail "$problem"

repository=${KIMI_MODEL_REPOSITORY:-$here/model_repository}
[[ ${KIMI_ADMIN_SECRET:-x} =~ ^[A-Za-z0-9._~-]+$ ]] || fail "KIMI_ADMIN_SECRET: letters, digits and . _ ~ - are allowed"
[ -d "$repository" ] || repository=$here/../model_repository

for port in "$http_port" "$grpc_port" "$metrics_port"; do
  # Asked before the sweep below: the regions of a server that has the port are in use.
  ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || fail "port $port is taken: does another server run here?"
done
# Last of the checks, as it takes seconds.
problem=$(python3 -m kimi_backend.cli.preflight) || fail "$problem"

# Who accepts connections until its descriptors are out accepts none then, nor answers on those that it has.
descriptors=$(ulimit -n)
ulimit -Sn hard 2>/dev/null || ulimit -Sn 1048576 2>/dev/null || true
[ "$descriptors" = "$(ulimit -n)" ] || echo "start.sh: open files: $descriptors were allowed, $(ulimit -n) are now" >&2

# glibc gives the memory of larger objects back as soon as they are freed: it would keep what the largest requests took.
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-524288}

work=$(mktemp -d /tmp/kimi.XXXXXX)
trap 'rm -rf "$work"' EXIT
export KIMI_DRAIN_FILE=$work/drain
# What the runners know spec_ensemble by: clients can call every model that is loaded. Models inherit the environment.
export KIMI_RUNNER_SECRET_FILE=$work/runner_secret
(umask 077 && head -c 32 /dev/urandom >"$KIMI_RUNNER_SECRET_FILE")
region_prefix=kimi_${http_port}_
secret=${KIMI_ADMIN_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
admin=shared-memory,model-repository,model-config,statistics,trace,logging

command=(
  tritonserver
  --model-repository="$repository"
  --model-control-mode=explicit
  "${models[@]/#/--load-model=}"
  --http-port="$http_port"
  --grpc-port="$grpc_port"
  --metrics-port="$metrics_port"
  "--http-restricted-api=$admin:kimi-admin=$secret"
  "--grpc-restricted-protocol=$admin:kimi-admin=$secret"
  "--backend-config=python,shm-region-prefix-name=$region_prefix"
  "--backend-config=python,shm-default-byte-size=$region_bytes"
  "--backend-config=python,shm-growth-byte-size=$region_bytes"
  # For each call of spec_ensemble_unary one, and 32 for all else.
  "--backend-config=python,thread-pool-size=160"
  # Newer servers give a model so long to load; 24.10 reads it and gives it any time.
  --backend-config=python,stub-timeout-seconds=3600
  --disable-auto-complete-config
  --exit-on-error=true
  --strict-readiness=true
  --exit-timeout-secs="${KIMI_EXIT_TIMEOUT_S:-5}"
  --log-format=ISO8601
)
if [ "${KIMI_DEVICE:-auto}" = cuda ]; then
  command+=(--cuda-memory-pool-byte-size="0:${KIMI_CUDA_POOL_BYTES:-268435456}")
fi
# A body is copied to a region twice. A server that knows a limit (24.10 does not) refuses what would not fit before that.
known=$(tritonserver --help 2>&1 || true)
if [[ $known == *--http-max-input-size* ]]; then
  command+=(--http-max-input-size="$((region_bytes / 2))")
fi
read -ra more <<<"${KIMI_TRITON_ARGS:-}"
command+=("${more[@]}" "$@") # last, as the last of an option counts

is_stopping=
drainer=
# Triton Server does not tell a model that it is about to stop: kimi_backend.hosting.drain says how it is told.
# shellcheck disable=SC2329 # called by the trap
drain() {
  # No `return`: in a trap it returns the status of what the signal interrupted, and `set -e` would end the script.
  if [ -n "$is_stopping" ]; then # asked again: live requests are cut off now
    echo 0 >"$KIMI_DRAIN_FILE"
  else
    is_stopping=1
    KIMI_ADMIN_SECRET=$secret python3 -m kimi_backend.hosting.drain "127.0.0.1:$http_port" &
    drainer=$!
  fi
}
trap drain TERM INT

# A server that was killed leaves its shared memory behind.
rm -f "/dev/shm/$region_prefix"*
"${command[@]}" &
server=$!
KIMI_ADMIN_SECRET=$secret python3 -m kimi_backend.hosting.watchdog "$server" $$ "$region_prefix" "127.0.0.1:$http_port" \
  "127.0.0.1:$grpc_port" &
watchdog=$!
code=0
while true; do
  # A signal ends `wait`, not what it waits for.
  wait ${drainer:-"$server"} && code=0 || code=$?
  if [ -n "$drainer" ] && ! kill -0 "$drainer" 2>/dev/null; then
    drainer=
    kill -TERM "$server" 2>/dev/null || true
  fi
  kill -0 "$server" 2>/dev/null || break
done
# It has seen that too, and ends what is left of the server.
wait "$watchdog" || true
rm -rf "/dev/shm/$region_prefix"*
[ -z "$is_stopping" ] || exit 0
echo "start.sh: the server ended by itself with code $code" >&2
exit $((code == 0 ? 1 : code))
