#!/usr/bin/env bash
# Train a coding agent with slime and Rollwright on 1..N nodes: start Ray on the hosts of a file, submit the job, and
# stop again what was started here. Nothing else is ever killed.
#
#   launch/slime_swe.sh [--nodes N] [--hostfile FILE] [--dry-run] [-- more arguments of slime's train.py]
#
# What is read from the environment is in the functions `settings` and `check` below, and in docs/slime.md.
set -euo pipefail

usage() {
  sed -n '2,7s/^# \{0,1\}//p' "$0"
}

die() {
  printf 'slime_swe.sh: %s\n' "$*" >&2
  exit 1
}

# ------------------------------------------------------------------------------------------------ what is to be done

settings() {
  NODES=${NODES:-${ACTOR_NUM_NODES:-8}}
  HOSTFILE=${HOSTFILE:-/root/mpi_rack_hostfile}
  GPUS_PER_NODE=${GPUS_PER_NODE:-${ACTOR_NUM_GPUS_PER_NODE:-8}}
  SSH_USER=${SSH_USER:-$(id -un)}
  RAY_PORT=${RAY_PORT:-6379}
  DASHBOARD_PORT=${DASHBOARD_PORT:-8265}
  START_SECONDS=${START_SECONDS:-120}
  PROBE_SECONDS=${PROBE_SECONDS:-20}
  PYTHON=${PYTHON:-python3}

  SLIME_DIR=${SLIME_DIR:-/root/slime}
  MEGATRON_DIR=${MEGATRON_DIR:-/root/Megatron-LM}
  MODEL_ARGS_FILE=${MODEL_ARGS_FILE:-$SLIME_DIR/scripts/models/qwen3.5-35B-A3B.sh}
  HF_CHECKPOINT=${HF_CHECKPOINT:-}
  REF_MODEL_PATH=${REF_MODEL_PATH:-}
  PROMPT_DATA=${PROMPT_DATA:-}
  EVAL_DATA=${EVAL_DATA:-}
  RUN_ROOT=${RUN_ROOT:-$PWD/runs/slime-$(date +%Y%m%d-%H%M%S)}

  MAX_CONTEXT_LEN=${MAX_CONTEXT_LEN:-96000}
  MAX_GEN_LEN=${MAX_GEN_LEN:-32768}
  ROLLOUT_BATCH_SIZE=${ROLLOUT_BATCH_SIZE:-8}
  SAMPLES_PER_PROMPT=${SAMPLES_PER_PROMPT:-8}
  TOOL_PARSER=${TOOL_PARSER:-qwen3_coder}
  REASONING_PARSER=${REASONING_PARSER:-qwen3}
  TP_SIZE=${TP_SIZE:-2}
  CP_SIZE=${CP_SIZE:-8}
  EP_SIZE=${EP_SIZE:-8}
  ENGINE_GPUS=${ENGINE_GPUS:-8}

  export SWE_AGENT=${SWE_AGENT:-claude_code}
  export SLIME_AGENT_SANDBOX_BACKEND=${SLIME_AGENT_SANDBOX_BACKEND:-e2b}
  export ADAPTER_PORT=${ADAPTER_PORT:-${SHIM_PORT:-18001}}
  export ROLLWRIGHT_OUTPUT=${ROLLWRIGHT_OUTPUT:-$RUN_ROOT}
}

is_number() {
  [[ $1 =~ ^[1-9][0-9]*$ ]]
}

need_path() { # name of the variable, what it is
  [[ -n ${!1} ]] || die "$1 is not set: $2"
  [[ -e ${!1} ]] || die "$1: there is no ${!1} ($2)"
}

check() {
  is_number "$NODES" || die "the number of nodes must be a positive number, not '$NODES'"
  is_number "$GPUS_PER_NODE" || die "GPUS_PER_NODE must be a positive number, not '$GPUS_PER_NODE'"
  command -v "$PYTHON" >/dev/null || die "there is no $PYTHON (set PYTHON)"
  command -v ray >/dev/null || die "there is no ray: pip install 'ray[default]'"
  "$PYTHON" -c 'import rollwright' 2>/dev/null || die "$PYTHON has no rollwright: pip install 'rollwright[e2b]'"

  [[ -f $SLIME_DIR/train.py ]] || die "SLIME_DIR: there is no $SLIME_DIR/train.py (a checkout of slime)"
  [[ -f $MODEL_ARGS_FILE ]] || die "MODEL_ARGS_FILE: there is no $MODEL_ARGS_FILE (slime's scripts/models has them)"
  need_path HF_CHECKPOINT 'folder of the Hugging Face model'
  [[ -f $HF_CHECKPOINT/tokenizer.json ]] || die "HF_CHECKPOINT: $HF_CHECKPOINT has no tokenizer.json"
  need_path REF_MODEL_PATH 'the model in torch_dist format'
  need_path PROMPT_DATA 'the training rows (.jsonl)'
  [[ -z $EVAL_DATA ]] || need_path EVAL_DATA 'the evaluation rows (.jsonl)'
  local name
  for name in SLIME_AGENT_CC_TARBALL SLIME_AGENT_NODE_TARBALL ROLLWRIGHT_RUN_FILE; do
    [[ -z ${!name:-} || -f ${!name} ]] || die "$name: there is no file ${!name}"
  done
  if [[ $SLIME_AGENT_SANDBOX_BACKEND == e2b ]]; then
    [[ -n ${E2B_API_KEY:-} ]] || die "E2B_API_KEY is not set: SLIME_AGENT_SANDBOX_BACKEND is e2b"
  fi
  hosts
}

is_here() { # a host name or address; only an address of this machine can be bound
  "$PYTHON" - "$1" <<'PY'
import socket, sys

for family, kind, protocol, _, address in socket.getaddrinfo(sys.argv[1], 0, type=socket.SOCK_STREAM):
    try:
        socket.socket(family, kind, protocol).bind(address)
        sys.exit()
    except OSError:
        pass
sys.exit(1)
PY
} 2>/dev/null

hosts() { # HOSTS: the head, then the workers
  HOSTS=()
  if ((NODES > 1)) || [[ -f $HOSTFILE ]]; then
    [[ -f $HOSTFILE ]] || die "HOSTFILE: there is no $HOSTFILE, and $NODES nodes are wanted (one host a line)"
    local host _
    while read -r host _ || [[ -n $host ]]; do
      [[ -z $host || $host == \#* ]] && continue
      [[ $host =~ ^[A-Za-z0-9][A-Za-z0-9._:-]*$ ]] || die "HOSTFILE: '$host' is not a host name or address"
      HOSTS+=("$host")
    done <"$HOSTFILE"
    ((${#HOSTS[@]} >= NODES)) || die "HOSTFILE: $HOSTFILE has ${#HOSTS[@]} hosts, and $NODES nodes are wanted"
    HOSTS=("${HOSTS[@]:0:NODES}")
    is_here "${HOSTS[0]}" ||
      die "HOSTFILE: the first host of $HOSTFILE is ${HOSTS[0]}, and this machine is $(uname -n):" \
        "start this on ${HOSTS[0]}, or put this machine first"
  else
    HOSTS=("${MASTER_ADDR:-$(hostname -I 2>/dev/null | awk '{print $1}')}")
    [[ -n ${HOSTS[0]} ]] || HOSTS=(127.0.0.1)
    is_here "${HOSTS[0]}" || die "MASTER_ADDR is ${HOSTS[0]}, which is not this machine, $(uname -n)"
  fi
  MASTER_ADDR=${MASTER_ADDR:-${HOSTS[0]}}
  [[ ${HOSTS[0]} == "$MASTER_ADDR" ]] || die "MASTER_ADDR is $MASTER_ADDR, but the first host of $HOSTFILE is ${HOSTS[0]}"
  export MASTER_ADDR
  local own
  own=127.0.0.1,localhost,$(IFS=, && printf '%s' "${HOSTS[*]}") # a proxy is not for what is in the cluster
  export no_proxy=${no_proxy:+$no_proxy,}$own
  export NO_PROXY=$no_proxy
  if [[ $SLIME_AGENT_SANDBOX_BACKEND == e2b ]]; then
    # Ray may put slime's rollout manager, and with it the gateway, on any node
    export ADAPTER_PUBLIC_HOST=${ADAPTER_PUBLIC_HOST:-${SLIME_HEAD_HOST:-node}}
    [[ $ADAPTER_PUBLIC_HOST != 127.* && $ADAPTER_PUBLIC_HOST != localhost ]] ||
      die "ADAPTER_PUBLIC_HOST is $ADAPTER_PUBLIC_HOST, which no sandbox reaches"
  fi
}

reachable() { # the hosts answer, and nothing of another job is in the way
  local host status probe
  printf -v probe 'command -v ray >/dev/null || exit 3; %q -c "import rollwright" 2>/dev/null || exit 4' "$PYTHON"
  for host in "${HOSTS[@]:1}"; do
    status=0
    # shellcheck disable=SC2029 # the command is made here, quoted for the shell over there
    ssh "${SSH[@]}" "$SSH_USER@$host" "$probe" || status=$?
    case $status in
      0) ;;
      3) die "host $host: there is no ray in the PATH of a shell that ssh starts" ;;
      4) die "host $host: its $PYTHON has no rollwright" ;;
      *) die "host $host: no password-less ssh as $SSH_USER" ;;
    esac
  done
  if (exec 3<>"/dev/tcp/127.0.0.1/$RAY_PORT") 2>/dev/null; then
    die "port $RAY_PORT is in use: another Ray runs here; stop it yourself, or set RAY_PORT and DASHBOARD_PORT"
  fi
}

# ------------------------------------------------------------------------------------------------------- the commands

SSH=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=30 -o StrictHostKeyChecking=accept-new)

commands() {
  HEAD=(ray start --head --block --node-ip-address "$MASTER_ADDR" --port "$RAY_PORT" --num-gpus "$GPUS_PER_NODE"
    --disable-usage-stats --dashboard-host 127.0.0.1 --dashboard-port "$DASHBOARD_PORT")
  # shellcheck source=/dev/null
  source "$MODEL_ARGS_FILE"
  [[ -n ${MODEL_ARGS+set} ]] || die "MODEL_ARGS_FILE: $MODEL_ARGS_FILE does not set MODEL_ARGS"
  TRAIN=("$PYTHON" -u "$SLIME_DIR/train.py"
    --actor-num-nodes "$NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --colocate
    "${MODEL_ARGS[@]}"
    --hf-checkpoint "$HF_CHECKPOINT" --ref-load "$REF_MODEL_PATH" --save "$RUN_ROOT/checkpoints" --save-interval 10
    --custom-generate-function-path rollwright.integrations.slime.generate
    --custom-reward-post-process-path rollwright.integrations.slime.post_process_rewards
    --custom-rollout-log-function-path rollwright.integrations.slime.log_rollout
    --custom-eval-rollout-log-function-path rollwright.integrations.slime.log_eval_rollout
    --prompt-data "$PROMPT_DATA" --input-key prompt --label-key label --metadata-key metadata
    --num-rollout 100 --rollout-batch-size "$ROLLOUT_BATCH_SIZE" --n-samples-per-prompt "$SAMPLES_PER_PROMPT"
    --rollout-max-context-len "$MAX_CONTEXT_LEN" --rollout-max-response-len "$MAX_GEN_LEN" --rollout-temperature 1.0
    --num-steps-per-rollout 1 --global-batch-size $((ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT))
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --tensor-model-parallel-size "$TP_SIZE" --sequence-parallel --context-parallel-size "$CP_SIZE"
    --expert-model-parallel-size "$EP_SIZE" --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --max-tokens-per-gpu $((MAX_CONTEXT_LEN / CP_SIZE))
    --rollout-num-gpus-per-engine "$ENGINE_GPUS" --sglang-mem-fraction-static 0.75
    --sglang-tool-call-parser "$TOOL_PARSER" --sglang-reasoning-parser "$REASONING_PARSER")
  if [[ -n $EVAL_DATA ]]; then
    TRAIN+=(--eval-prompt-data swe "$EVAL_DATA" --eval-interval 10 --n-samples-per-eval-prompt 1)
  fi
  TRAIN+=("${MORE[@]}")
}

worker() { # one argument: the address of a host. Lives as long as its stdin: then it ends the Ray it has started.
  printf 'ray start --block --address %q --node-ip-address %q --num-gpus %q --disable-usage-stats & ray=$!; ' \
    "$MASTER_ADDR:$RAY_PORT" "$1" "$GPUS_PER_NODE"
  # shellcheck disable=SC2016 # for the shell over there
  printf '%s' 'cat >/dev/null; kill -TERM $ray 2>/dev/null; wait $ray'
}

environment() { # the names that slime's workers need, as JSON; one argument: `shown` hides secrets
  "$PYTHON" - "${1:-}" "$MEGATRON_DIR:$SLIME_DIR" <<'PY'
import json, os, sys

prefixes = ("SWE_", "SLIME_AGENT_", "SLIME_HEAD_", "ADAPTER_", "SHIM_", "E2B_", "ROLLWRIGHT_", "NCCL_", "GLOO_",
            "SGLANG_", "HF_", "WANDB_")
names = {"MASTER_ADDR", "TP_SOCKET_IFNAME", "no_proxy", "NO_PROXY", "http_proxy", "https_proxy"}
found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes) or name in names}
if sys.argv[1] == "shown":
    secret = ("KEY", "TOKEN", "SECRET", "PASSWORD", "EXTRA_ENVS")
    found = {n: "(set)" if "@" in v or any(part in n for part in secret) else v for n, v in found.items()}
found |= {"PYTHONPATH": sys.argv[2], "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
print(json.dumps({"env_vars": found}, indent=1))
PY
}

# ------------------------------------------------------------------------------------------------------------- running

STARTED=() # pids of what we have started, the head first
LIFE=      # while this descriptor is open, workers live
PROBE=     # pid of the process that counts the nodes
WORK=

stop_all() {
  local status=$?
  trap - EXIT INT TERM
  [[ -z $PROBE ]] || kill "$PROBE" 2>/dev/null || true
  [[ -z ${JOB:-} ]] || ray job stop --address "http://127.0.0.1:$DASHBOARD_PORT" "$JOB" >/dev/null 2>&1 || true
  [[ -z $LIFE ]] || exec {LIFE}>&-
  local pid
  for pid in "${STARTED[@]:1}"; do wait "$pid" 2>/dev/null || true; done
  if ((${#STARTED[@]})); then
    kill -TERM "${STARTED[0]}" 2>/dev/null || true
    wait "${STARTED[0]}" 2>/dev/null || true
  fi
  [[ -z $WORK ]] || rm -rf "$WORK"
  exit "$status"
}

wait_for_nodes() {
  local deadline=$((SECONDS + START_SECONDS)) seen
  while ((SECONDS < deadline)); do
    kill -0 "${STARTED[0]}" 2>/dev/null ||
      die "Ray's head ended: $(tail -n 1 "$RUN_ROOT/ray-head.log") (all of it: $RUN_ROOT/ray-head.log)"
    # Ray itself would look for a head for minutes; and only what is waited for lets a signal through
    timeout "$PROBE_SECONDS" "$PYTHON" -c 'import ray, sys
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))' "$MASTER_ADDR:$RAY_PORT" >"$WORK/seen" 2>/dev/null &
    PROBE=$!
    wait "$PROBE" || true
    PROBE=
    seen=$(<"$WORK/seen")
    seen=${seen:-0}
    ((seen >= NODES)) && return
    sleep 1
  done
  die "${seen:-0} of $NODES nodes have joined within $START_SECONDS s; see $RUN_ROOT/ray-*.log"
}

run() {
  reachable
  mkdir -p "$RUN_ROOT"
  WORK=$(mktemp -d)
  trap stop_all EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM

  "${HEAD[@]}" >"$RUN_ROOT/ray-head.log" 2>&1 &
  STARTED+=($!)
  mkfifo "$WORK/life"
  exec {LIFE}<>"$WORK/life"
  local host
  for host in "${HOSTS[@]:1}"; do
    # shellcheck disable=SC2029 # the command is made here, quoted for the shell over there
    ssh "${SSH[@]}" "$SSH_USER@$host" "$(worker "$host")" <"$WORK/life" {LIFE}>&- >"$RUN_ROOT/ray-$host.log" 2>&1 &
    STARTED+=($!)
  done
  wait_for_nodes

  (umask 077 && environment >"$WORK/environment.json") # a file, for a key must not be seen in `ps`
  JOB=rollwright-$(date +%s)-$$
  printf 'run folder %s, job %s\n' "$RUN_ROOT" "$JOB"
  ray job submit --address "http://127.0.0.1:$DASHBOARD_PORT" --submission-id "$JOB" \
    --runtime-env "$WORK/environment.json" -- "${TRAIN[@]}" {LIFE}>&- > >(tee "$RUN_ROOT/run.log") 2>&1 &
  local submit=$!
  local status=0
  wait "$submit" || status=$?
  JOB=
  exit "$status"
}

dry_run() {
  printf '# run folder\n%s\n\n# head: %s\n' "$RUN_ROOT" "${HOSTS[0]}"
  printf '%q ' "${HEAD[@]}"
  local host
  for host in "${HOSTS[@]:1}"; do
    printf '\n\n# worker: %s\nssh %s %q' "$host" "$SSH_USER@$host" "$(worker "$host")"
  done
  printf '\n\n# environment of the job\n'
  environment shown
  printf '\n# job\n'
  printf '%q ' "${TRAIN[@]}"
  printf '\n'
}

DRY_RUN=
MORE=()
while (($#)); do
  case $1 in
    --nodes) NODES=${2:?--nodes needs a number} && shift 2 ;;
    --hostfile) HOSTFILE=${2:?--hostfile needs a file} && shift 2 ;;
    --dry-run) DRY_RUN=1 && shift ;;
    -h | --help) usage && exit 0 ;;
    --) shift && MORE=("$@") && break ;;
    *) die "unknown argument '$1'; --help shows them" ;;
  esac
done
settings
check
commands
if [[ -n $DRY_RUN ]]; then dry_run; else run; fi
