# shellcheck shell=bash
# Every program is recorded instead of run; builtins that would exit the shell or change anything do nothing. No process
# is there to be waited for, and a loop that sleeps so often waits for what only a program could do: its `sleep` leaves
# it, which no function could, and is one command, so that it may stand wherever a command may.
__mark() {
    local text="$*" code i LC_ALL=C
    printf 9q
    for ((i = 0; i < ${#text}; i++)); do printf -v code %d "'${text:i:1}"; printf %02x "$((code & 255))"; done
    printf q
}
__record() {
    local word  # each is written at once: the commands of a pipeline run at the same time
    for word in "$@" $'\n'; do printf '%s\0' "$BASHPID ${word//$'\n'/$'\x1e'}"; done >&"$RECORD"
}
command_not_found_handle() {
    local input="" command="" called
    __record "$@"
    [[ -p /dev/stdin ]] && IFS= read -r -d '' input
    printf -v called '%q ' "$@"
    if [[ $input =~ ^9q[0-9a-f]+q$ ]]; then command="$input | $called"
    elif [[ -n $input ]]; then command="echo \"${input%$'\n'}\" | $called"
    elif [[ -n ${__number-} || ${1##*/} =~ ^($SOURCES)$ ]]; then command=$called; fi
    [[ -n $command ]] && __mark "${command% }"
    __texts_in "$@" "$input"
    [[ "$*" =~ $TRAINS ]]  # others fail, as if not installed
}
__texts_in() {
    local word
    for word in "$@"; do [[ $word =~ $SETTING ]] && return; done
    for word in "${@:2}"; do
        [[ $word =~ ^--?[a-z-]+=(.*)$ ]] && word=${BASH_REMATCH[1]}
        [[ ${1##*/} != python* && $word == *[[:space:]]* && $word =~ $TRAINS ]] && : "$(eval "$word")"
    done
}
cat() {
    local text
    (( $# )) && [[ $* != - ]] && { command_not_found_handle cat "$@"; return; }
    IFS= read -r -d '' text; printf %s "$text"
    [[ -p /dev/stdout ]] || __texts_in cat "$text"
}
tee() { cat; }
seq() {
    local first=1 step=1 last=${@: -1} i
    (( $# > 1 )) && first=$1; (( $# > 2 )) && step=$2
    for ((i = first; step > 0 ? i <= last : i >= last; i += step)); do echo $i; done
}
__sum() {  # of $((...)), a mark where a program's output is part of it, or it cannot be computed
    local __rest=$1 __text="" __part __open="" __value=""
    while [[ $__rest =~ ^(9q[0-9a-f]+q|[A-Za-z_][A-Za-z_0-9]*|[0-9][A-Za-z_0-9]*|[^A-Za-z_0-9]+) ]]; do
        __part=${BASH_REMATCH[0]} __rest=${__rest:${#BASH_REMATCH[0]}}
        if [[ $__part =~ ^[A-Za-z_] && -n ${!__part+set} ]]; then
            # A variable that is empty was to have the output of a program; it must be set where the number is computed.
            if [[ -z ${!__part} ]]; then __part="\${$__part:?}" __open=1; else __part=${!__part}; fi
        fi
        [[ $__part == *9q* ]] && __open=1
        __text+=$__part
    done
    [[ -n $__open ]] || __value=$(echo "$(($1))")
    if [[ -n $__value ]]; then echo "$__value"; else __mark "echo \$(($__text))"; fi
}
basename() { local name="${1%/}"; name="${name##*/}"; printf '%s\n' "${name%"${2-}"}"; }
dirname() { [[ $1 == */* ]] && printf '%s\n' "${1%/*}" || printf '.\n'; }
realpath() { printf '%s\n' "${@: -1}"; }
readlink() { printf '%s\n' "${@: -1}"; }
for name in python python3 python3.10 python3.11 python3.12 "${__paths[@]}"; do
    eval "function $name { command_not_found_handle $name \"\$@\"; }"
done
__slept() { (( ++__sleeps[BASH_LINENO[0]] % 100 == 0 )); }
shopt -s expand_aliases
alias sleep='builtin eval "__slept && break; : #"'
exec() { command_not_found_handle "$@"; }
for name in set cd . source exit trap ulimit shopt alias unalias; do eval "$name() { :; }"; done
eval() {
    local text="$*" i
    __record "$EVALUATED" "$text"
    for i in "${!__texts[@]}"; do [[ $text == "${__texts[i]}" ]] && text=${__without_files[i]} && break; done
    builtin eval "$text"
}
for name in RANDOM SRANDOM SECONDS EPOCHSECONDS EPOCHREALTIME; do
    unset "$name"  # it is a plain variable from here on
    printf -v "$name" %s "$(__mark "echo \$$name")"
done
kill() { false; }
wait() { [[ $1 != -n ]]; }
