#!/usr/bin/env bash
# hybridrl launch ssh: `bash FILE` on the first host starts the run, and resumes it.
set -eo pipefail
umask 077
unset RAY_ADDRESS

@@common

mkdir -p "$logs"
token=$logs/$$.token hosts=$logs/$$.hosts
finish() {
    trap '' HUP INT TERM
    jobs -p | xargs -r kill 2>/dev/null || true
    wait
    rm -f "$token" "$hosts"
}
trap finish EXIT
trap '' HUP # for Ray, which the driver needs to save
trap stop INT TERM
head -c 16 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$token"
printf '%s\n' @@hosts >"$hosts"
mapfile -t names <"$hosts"
head=$(inside hybridrl launch address "${names[1]:-${names[0]}}" @@interface "${names[0]}")

declare -A attempt
for name in "${names[@]:1}"; do
    timeout @@wait ssh -o ConnectionAttempts=@@wait @@options "$name" true </dev/null >"$logs/$name.log" 2>&1 &
    attempt[$name]=$!
done
echo "${names[0]}" >"$hosts"
for name in "${names[@]:1}"; do
    if wait "${attempt[$name]}"; then
        echo "$name" >>"$hosts"
    else
        echo "$name has not answered within @@wait s: $(tail -n 1 "$logs/$name.log")" >&2
    fi
done
mapfile -t names <"$hosts"
if [ "${#names[@]}" -lt @@least ]; then exit 1; fi
if [ "${#names[@]}" -lt @@nodes ]; then
    echo "starting on ${#names[@]} of @@nodes hosts: trainer.nnodes=${#names[@]}"
    set -- "$@" trainer.nnodes="${#names[@]}"
fi

# The Ray of a host ends with its standard input, so also when this machine is lost.
rank=0
for name in "${names[@]}"; do
    {
        echo "$functions"
        echo "{ prepare ${token@Q} && node $head @@port @@wait @@interface $rank $name & node=\$!"
        echo 'cat >/dev/null; kill -TERM "$node"; wait "$node"; exit; }'
        exec tail --pid=$$ -f /dev/null
    } | if [ "$rank" = 0 ]; then exec bash -s; else exec ssh @@options "$name" bash -s; fi >"$logs/$name.log" 2>&1 &
    let rank+=1
done
trap stop HUP INT TERM
export RAY_ADDRESS=$head:@@port
run hybridrl doctor cluster --wait @@wait --hosts "$hosts" --logs "$logs" "$@" || exit
run hybridrl train "$@" || exit
