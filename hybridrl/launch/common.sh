# prepare TOKEN: the directory and the variables of the run, in each shell that starts a program of it.
prepare() {
    cd @@workdir || return
@@exports
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$1
    eval @@before
}

# node HEAD PORT SECONDS INTERFACE RANK NAME: the Ray of this host, until a signal ends it. A host that is ready before the
# head repeats its attempt for that time. Files and ports are those of this Ray only: another one of the user stays.
node() {
    ended= ray= temporary= address=$1
    # A Ray that waits for a head does not see SIGTERM.
    trap 'ended=1; kill -TERM "$ray" 2>/dev/null; timeout 5 tail -s 0.2 --pid="$ray" -f /dev/null || kill -KILL "$ray" 2>/dev/null' TERM
    command -v ray >/dev/null && command -v hybridrl >/dev/null || { echo "ray and hybridrl are not on the PATH; see --before"; return 127; }
    [ "$5" = 0 ] || address=$(hybridrl launch address "$1" "$4") || return
    temporary=$(mktemp -d /tmp/ray-XXXXXX) || return
    ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
    let deadline=SECONDS+$3 rank=$5
    if [ "$rank" = 0 ]; then set -- --head --port="$2" --node-name="$6"; else set -- --address="$1:$2" --node-name="$6"; fi
    while [ -z "$ended" ]; do
        HYBRIDRL_RAY=$temporary ray start "$@" --node-ip-address="$address" --temp-dir="$temporary" --block \
            --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0 --disable-usage-stats &
        ray=$!
        wait "$ray"
        [ "$rank" != 0 ] && [ "$SECONDS" -lt "$deadline" ] || break
    done
    wait "$ray"
    status=$?
    # What outlives its raylet, as Ray's agent does for a minute without a head, has the directory in its environment.
    grep -lzsxF "HYBRIDRL_RAY=$temporary" /proc/[0-9]*/environ | cut -d/ -f3 | xargs -r kill -KILL 2>/dev/null
    rm -rf "$temporary"
    return "$status"
}
functions=$(declare -f prepare node)

# inside PROGRAM ...: becomes that program, in the environment of the run.
inside() {
    exec @@{step}bash -c "$functions; prepare \"\$0\" && exec \"\$@\"" "$token" "$@"
}

# A request to stop goes to the program that runs, and ends the script if there is none.
child= stopped= limit=
stop() {
    stopped=1 interrupted=1
    [ -n "$child" ] || exit 130
    kill -TERM "$child" 2>/dev/null || true
}

# run PROGRAM ...: its exit status. A signal ends `wait` early, so it is repeated.
run() {
    local status
    [ -z "$stopped" ] || return 130
    inside "$@" &
    child=$!
    while interrupted= status=0; wait "$child" || status=$?; [ -n "$interrupted" ]; do :; done
    child=
    return "$status"
}

logs=@@logs
set -- \
@@words
