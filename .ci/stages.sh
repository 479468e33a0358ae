# Stages of continuous integration: each with a time limit and a log of its own, in the foreground or the background.
# Sourced by .ci/run, which says what the stages are.
#
#   stage NAME LIMIT_S COMMAND...   run it and print its closing lines; where it fails, its whole log, and end
#   begin NAME LIMIT_S COMMAND...   start it in the background
#   finish NAME                     wait for it, then as `stage`
#
# However this ends, it prints the minutes by stage and leaves no process running.

LOGS=$(mktemp -d -t outpace-ci-XXXXXX)
export OUTPACE_CI_RUN="$$-$(date +%s)" # in the environment of every process that a stage starts
CI_BEGAN=$(date +%s)
declare -A STAGE_PID STAGE_BEGAN
STAGES=()

begin() {
  local name=$1 limit=$2 left=$((CI_BEGAN + CI_LIMIT_S - $(date +%s)))
  shift 2
  limit=$((limit < left ? limit : left > 1 ? left : 1))
  STAGES+=("$name")
  STAGE_BEGAN[$name]=$(date +%s)
  (
    code=0
    timeout --kill-after=20 "$limit" "$@" </dev/null >"$LOGS/$name.log" 2>&1 || code=$?
    if [ $code = 124 ] || [ $code = 137 ]; then echo "== $name took longer than $limit s and was ended" >>"$LOGS/$name.log"; fi
    echo "$code $(date +%s)" >"$LOGS/$name.end"
  ) &
  STAGE_PID[$name]=$!
}

finish() {
  local name=$1 code ended
  wait "${STAGE_PID[$name]}" || true
  read -r code ended <"$LOGS/$name.end"
  echo "== $name: $(minutes $((ended - STAGE_BEGAN[$name])))"
  if [ "$code" != 0 ]; then
    cat "$LOGS/$name.log"
    echo "== $name failed with exit code $code"
    exit 1
  fi
  closing_lines "$LOGS/$name.log"
}

stage() {
  echo "== $1 ..."
  begin "$@"
  finish "$1"
}

# Of a pytest log the summary, with what was skipped and why; of any other the last lines.
closing_lines() {
  if grep -q "short test summary info" "$1"; then
    sed -n '/short test summary info/,$p' "$1"
  else
    tail -n 3 "$1"
  fi
}

minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

report() {
  local name code ended now
  now=$(date +%s)
  echo "== minutes by stage ($CI_MACHINE)"
  for name in "${STAGES[@]}"; do
    code=running ended=$now
    if [ -e "$LOGS/$name.end" ]; then read -r code ended <"$LOGS/$name.end"; fi
    case $code in 0) code="" ;; running) code="  not finished" ;; *) code="  failed" ;; esac
    printf '%8s  %s%s\n' "$(minutes $((ended - STAGE_BEGAN[$name])))" "$name" "$code"
  done
  printf '%8s  all together\n' "$(minutes $((now - CI_BEGAN)))"
}

started_processes() {
  local file
  for file in $(grep -lszx "OUTPACE_CI_RUN=$OUTPACE_CI_RUN" /proc/[0-9]*/environ || true); do
    file=${file#/proc/}
    if [ -e "/proc/${file%/environ}/cmdline" ]; then echo "${file%/environ}"; fi
  done
}

end_processes() {
  local left
  left=$(started_processes)
  if [ -z "$left" ]; then return; fi
  kill $left 2>/dev/null || true
  sleep 3
  left=$(started_processes)
  if [ -n "$left" ]; then kill -KILL $left 2>/dev/null || true; fi
}

on_exit() {
  local code=$?
  trap - EXIT
  report
  end_processes
  rm -rf "$LOGS"
  exit "$code"
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
