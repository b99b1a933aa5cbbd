"""Launch scripts are evaluated as bash does, without any effect."""

import re
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.load import resolve_config
from hybridrl.config.schema import SFTConfig
from hybridrl.doctor import launches

SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
cd "$(dirname "$0")" || exit 1
BATCH=${TRAIN_BATCH_SIZE:-64}
HALF=$((BATCH / 2))
ALGORITHM=(
    algorithm.adv_estimator=grpo   # groups
    +algorithm.filter_groups.enable=False
)
if [ "$(nvidia-smi -L | wc -l)" = 8 ]; then ALGORITHM+=(trainer.nnodes=2); fi
if python3 -c 'import torch_npu' 2>/dev/null; then DEVICE=npu; else DEVICE=cuda; fi
export NCCL_DEBUG=WARN
PYTHONUNBUFFERED=1 /usr/bin/python3 -m verl.trainer.main_ppo \\
    "${ALGORITHM[@]}" \\
    data.train_files="['/data/a b.parquet']" \\
    data.train_batch_size=$BATCH actor_rollout_ref.actor.ppo_mini_batch_size=$HALF \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    rollout.n=5 trainer.device=$DEVICE trainer.n_gpus_per_node=8 \\
    trainer.balance_batch=True actor_rollout_ref.actor.optim.total_training_steps=100 \\
    actor_rollout_ref.rollout.load_format=safetensors "$@" 2>&1 | tee train.log > /tmp/other.log
"""


RUN = "python3 -m verl.trainer.main_ppo"
MODEL = "actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_files=a.parquet"


@pytest.fixture
def ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is stopped after a second."""
    monkeypatch.setattr(launches, "SECONDS", 1)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def migrate(doctor, script):
    """Migrate a script of this text, with arguments; returns the exit status and what is printed."""

    def run(text: str, *arguments: str) -> tuple[int, str]:
        script.write_text(text)
        return doctor("migrate", str(script), *arguments)

    return run


def test_a_script_becomes_a_command_for_hybridrl(doctor, script):
    status, output = doctor("migrate", str(script))
    command = output[output.index("hybridrl train") :]
    assert status == 0
    assert [line.strip(" \\") for line in command.strip().splitlines()] == [
        "hybridrl train",
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=False",
        """'data.train_files=['"'"'/data/a b.parquet'"'"']'""",
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "actor_rollout_ref.rollout.n=5",
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=8",
    ]


def test_every_difference_is_reported(doctor, script):
    output = doctor("migrate", str(script))[1]
    assert "# warning [old-name] rollout.n is now actor_rollout_ref.rollout.n" in output
    assert "# warning [ignored-key] actor_rollout_ref.rollout.load_format has no effect" in output
    assert "[ignored-key] actor_rollout_ref.actor.optim.total_training_steps has no effect" in output
    assert "; trainer.save_freq=0 here, -1 in verl\n" in output
    assert output.count("[default]") == 1  # all of them in one line, which is the same for most scripts
    left_out = output.partition("[left-out]")[2].partition("\n")[0]
    assert "trainer.balance_batch=True (" in left_out and "load_format" not in left_out
    assert "trainer.n_gpus_per_node=null here" not in output  # the script sets it


def test_rejected_settings_are_reported_and_left_out(migrate):
    status, output = migrate(f"{RUN} data.train_files=x trainer.scheduler=x model_engine=dp\n")
    assert status == 1 and "# error [unsupported] trainer.scheduler=x: " in output
    assert "# error [value] actor_rollout_ref.model.path is not set" in output
    assert output.rstrip().endswith("data.train_files=x \\\n    actor_rollout_ref.model.path=path/to/model")


def test_variables_of_the_environment_count(doctor, script, monkeypatch):
    monkeypatch.setenv("TRAIN_BATCH_SIZE", "512")
    assert "data.train_batch_size=512" in doctor("migrate", str(script))[1]


def test_no_program_is_started_and_no_file_is_written(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").write_text("#!/bin/sh\necho x > made\n")
    (tmp_path / "tool").chmod(0o755)
    script.write_text(
        "tool\n./tool\n/bin/touch made\nenv touch made\ncommand touch made\nexec /bin/touch made\necho x > made\n"
        "printf x >| made\n: >> made\ncat <<< x &> made\nPATH=/bin:/usr/bin touch made\nrm -rf .\nkill -9 $PPID\n"
        "last word\n"
    )
    commands, *_ = launches.commands_of(script)
    assert commands[-1] == ["last", "word"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh", "tool"]


HOSTILE = {
    "writing": """
        builtin history -s 'import os'; builtin history -w yaml.py
        builtin history -s x; builtin history -a made
        builtin enable history kill exec; history -w made
        builtin exec 3> made
        builtin exec 3<> made
        builtin eval 'echo x > made'
        builtin set -o noclobber; builtin eval 'echo x >| made'
        builtin trap 'echo x > made' EXIT DEBUG
        builtin cd /tmp && builtin history -w yaml.py
        coproc touch made
        TMPDIR=. ; while read -r l; do :; done <<< "$(printf 'x%.0s' {1..70000})"
        builtin set +r; touch made
        builtin shopt -u restricted_shell; /bin/touch made
        BASH_CMDS[touch]=/bin/touch; touch made
        builtin hash -p /bin/touch t; t made
        builtin command -p touch made
        unset -f command_not_found_handle; PATH=/bin:/usr/bin; touch made
        builtin unset -f exec; exec /bin/touch made
        PROMPT_COMMAND='echo x > made'; builtin fc -e /bin/touch
        HISTFILE=$PWD/made; builtin set -o history; echo x
        builtin enable -f /usr/lib/bash/mkdir mkdir; mkdir made
        builtin ulimit -f unlimited; builtin umask 0; builtin printf x > made
        mapfile -C 'echo x > made #' -c 1 lines <<< a
        BASH_ENV=evil ENV=evil bash -c 'touch made'
        builtin source evil; builtin . evil
        """,
    "signals": """
        builtin kill -9 VICTIM
        builtin kill -9 -1
        builtin kill -9 $PPID
        builtin enable kill; builtin command kill -KILL VICTIM
        builtin suspend -f
        builtin unset -f kill; kill -TERM VICTIM
        """,
    "network": """
        builtin exec 3<> /dev/tcp/127.0.0.1/PORT
        builtin eval 'echo x > /dev/tcp/127.0.0.1/PORT'
        read -r LEAK < /dev/tcp/127.0.0.1/PORT
        builtin eval 'echo x > /dev/udp/127.0.0.1/PORT'
        """,
    "reading": """
        echo "$MY_API_KEY $DATABASE $PLAIN"
        for v in $(compgen -e); do echo "$v=${!v}"; done
        printf -v v %s MY_API_; v+=KEY; echo "${!v}"
        builtin export -p; builtin declare -p
        echo "$(< netrc)"
        mapfile -t lines < netrc; echo "${lines[@]}"
        while read -r l; do echo "$l"; done < netrc
        mapfile -t lines < <(printf '%s\\n' "$(< netrc)"); echo "${lines[@]}"
        builtin history -r netrc; builtin history
        builtin source netrc; builtin . ./netrc
        echo "$(< /proc/self/environ)$(< /proc/$PPID/environ)"
        echo * .* /etc/*
        builtin compgen -f
        """,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_script_reaches_nothing(migrate, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_API_KEY", "canary-named")
    monkeypatch.setenv("DATABASE", "postgres://me:canary-form@host/x")
    monkeypatch.setenv("UNNAMED", "canary-unnamed")
    (tmp_path / "netrc").write_text("machine host login me password canary-file\n")
    (tmp_path / "evil").write_text("echo x > made\n")
    there = sorted(path.name for path in tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "60"]) as victim:
        port = str(server.getsockname()[1])
        lines = HOSTILE[kind].replace("VICTIM", str(victim.pid)).replace("PORT", port).strip().splitlines()
        parts = "".join(f"LEAK+=$( {{ {line.strip()}\n}} 2>&1 )\n" for line in lines)
        output = migrate(f'{parts}{RUN} {MODEL} trainer.experiment_name="x$LEAK"\n')[1]
        assert victim.poll() is None
        victim.kill()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "trainer.experiment_name=" in output
    assert "canary" not in output and "netrc run.sh" not in output
    assert sorted(path.name for path in tmp_path.iterdir()) == there


@pytest.mark.parametrize(
    "endless",
    [
        "while :; do :; done &",
        "f() { f | f & }; f",
        "builtin trap '' TERM XFSZ XCPU; while echo 0123456789; do :; done >&2",
        "x=xxxxxxxx; while :; do x=$x$x; done",
        "f() { f; }; f",
        "while program; do :; done",
        "until program; do :; done",
        "read -r line < <(while :; do :; done)",
    ],
)
def test_a_script_that_takes_all_it_can_is_stopped(migrate, script, ends_soon, endless):
    status, output = migrate(f"{endless}\n")
    assert status == 2 and len(output) < 2000
    deadline = time.monotonic() + 20
    while any(str(script) in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_another_process_may_end_while_the_processes_of_a_script_are_counted(script, vanishing):
    vanishing("")
    script.write_text("program 1\n")
    assert launches.commands_of(script) == ([["program", "1"]], "", "")


def test_a_secret_of_the_environment_is_read_when_the_command_runs(migrate, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "canary")
    output = migrate(f"{RUN} {MODEL} trainer.experiment_name=x-$MY_API_KEY\n")[1]
    assert 'trainer.experiment_name=x-"$(printenv MY_API_KEY)"' in output
    assert "trainer.experiment_name=x-canary" in printed(output)


def test_what_a_process_substitution_gives_is_read(migrate):
    _, output = migrate(
        "mapfile -t A < <(printf '%s\\n' trainer.nnodes=2 \"data.max_prompt_length=$(echo 64)\")\n"
        f'while read -r one; do A+=("$one"); done < <(echo rollout.n=4)\n{RUN} {MODEL} "${{A[@]}}"\n'
    )
    words = printed(output)
    assert {"trainer.nnodes=2", "data.max_prompt_length=64", "actor_rollout_ref.rollout.n=4"} <= {*words}


@pytest.mark.parametrize("content", [b"\0\1", b"# " + b"x" * 200_000, b"echo \xff\xfe\n"])
def test_what_is_no_launch_script_is_rejected(doctor, script, content):
    script.write_bytes(content)
    status, output = doctor("migrate", str(script))
    assert status == 2 and str(script) in output and "Traceback" not in output


def printed(output: str, name: str = "train") -> list[str]:
    """The words of the printed command, which must be accepted unchanged."""
    command = re.split(rf"^hybridrl {name} ", output, maxsplit=1, flags=re.M)[1]
    made = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
    words = made.stdout.split("\0")[:-1]
    schema, file = (PPOConfig, "ppo_trainer") if name == "train" else (SFTConfig, "sft_trainer")
    assert not resolve_config(schema, words, file, offline=True).findings.errors
    return words


def test_a_name_from_a_program_is_evaluated_when_the_command_runs(migrate):
    status, output = migrate(
        "NAME=grpo_$(date +%m%d-%H:%M)\nSIZE=$(basename /models/Qwen3-8B)\n"
        f"{RUN} {MODEL} trainer.experiment_name=${{SIZE}}_$NAME "
        "trainer.default_local_dir=$(cat root | tr a b)/x trainer.nnodes=$(nproc) "
        "trainer.project_name=$(echo $(hostname)-x | tr a-z A-Z)\n"
    )
    assert 'trainer.experiment_name=Qwen3-8B_grpo_"$(date +%m%d-%H:%M)"' in output
    assert 'trainer.default_local_dir="$(cat root | tr a b)"/x' in output
    assert 'trainer.project_name="$(echo "$(hostname)-x" | tr a-z A-Z)"' in output
    assert "# warning [computed] trainer.nnodes=$(nproc): a program computes the value, so it is not checked" in output
    assert status == 0 and 'trainer.nnodes="$(nproc)"' in output


COMPUTED = {
    "a loop's seed": ("for s in 1 2; do T=$(($(date +%s) % 100000)); RUN trainer.seed=$((T + s)); done", 2),
    "a loop over seq": ("for s in $(seq 3 2 7); do RUN trainer.seed=$s; done", 3),
    "bash's own random number": ("RUN trainer.seed=$((RANDOM % 10))\nRUN trainer.seed=$SECONDS", 2),
    "a program that is not known": ("RUN trainer.seed=$(( $(python3 -c 'print(1)') + 1 ))", 1),
    "a variable that a program sets": ("N=$(some_program -L | wc -l)\nRUN trainer.seed=$((8 / N))", 1),
    "expr and backticks": ("RUN trainer.seed=`expr $(date +%s) % 100`", 1),
    "in a text": ("bash -c 'RUN trainer.seed=$(( $(date +%s) % 7 ))'", 1),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_value_that_a_program_computes_is_named_and_the_reading_continues(migrate, monkeypatch, kind):
    text, runs = COMPUTED[kind]
    monkeypatch.setenv("N", "4")  # where the printed command is run
    after = f"n=1; x=$((n++)); ((n += 1)); let n=n*2-1\n{RUN} {MODEL} trainer.nnodes=$n\n"  # bash computes it
    status, output = migrate(f"{text.replace('RUN', f'{RUN} {MODEL}')}\n{after}")
    *commands, last = (printed(f"hybridrl train{part}") for part in output.split("hybridrl train")[1:])
    seeds = [word for words in commands for word in words if "seed" in word]
    assert status == 0 and len(seeds) == runs and "trainer.nnodes=5" in last
    if "seq" in kind:
        assert seeds == ["trainer.seed=3", "trainer.seed=5", "trainer.seed=7"]
    else:
        assert output.count("# warning [computed] trainer.seed=$(") == output.count('trainer.seed="$(') == runs


def test_a_command_that_bash_leaves_out_is_named_with_its_line(migrate):
    output = migrate(f"{RUN} {MODEL}\n\nx=abc; {RUN} {MODEL} trainer.experiment_name=${{x:$(nproc)}}\n")[1]
    assert "# warning [incomplete] bash left out a command of " in output and ": line 3: x: $(nproc): value" in output


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("\ntrue\nx=abc; echo ${x:$(nproc)}", "line 3: x: $(nproc): value too great for base"),
        ("\n$PROGRAM data.train_files=/data/a.parquet", "line 2: data.train_files=/data/a.parquet: No such file or"),
        ("\n\nM=${MODEL_PATH:?must be set}", "line 3: MODEL_PATH: must be set"),
        ("true\nif true; then", "unexpected end of file"),
    ],
)
def test_bash_s_own_last_error_is_shown_with_its_line(migrate, text, error):
    status, output = migrate(f"{text}\n")
    assert status == 2 and error in " ".join(output.split())


SHELLS = {
    "ssh": 'ssh -i key user@host "cd /data && source env && RUN > log 2>&1"',
    "ssh with a here-document": "ssh host <<EOF\ncd /data\nRUN\nEOF",
    "ssh with a pipe": "cat <<'EOF' | ssh host bash -s\nRUN\nEOF",
    "tmux": "tmux new -d -s main\ntmux send-keys -t main 'RUN' C-m",
    "srun": "srun --jobid 3 bash -lc 'RUN'",
    "sbatch --wrap": 'sbatch -N 1 --wrap="RUN"',
    "a script that is written": "cat > job.sh <<EOF\n#SBATCH -N 1\nsrun RUN\nEOF\nsbatch job.sh",
    "docker": 'docker exec -it box bash -c "export X=1; RUN"',
    "kubectl": "kubectl exec pod -- /bin/bash -c 'RUN'",
    "a shell in a shell": "su user -c \"bash -c 'RUN'\"",
    "a here-string": 'bash <<< "RUN"',
    "echo": 'echo "RUN" | tee command.sh | bash',
    "a variable": 'C=$(cat <<EOF\nRUN\nEOF\n)\nscreen -dmS x bash -c "$C"',
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_in_a_text_for_another_shell_is_read(migrate, tmp_path, monkeypatch, shell):
    monkeypatch.chdir(tmp_path)
    text = SHELLS[shell].replace("RUN", f"{RUN} {MODEL} trainer.nnodes=$NODES")
    status, output = migrate(f"NODES=3\n{text}\n{RUN} {MODEL} trainer.experiment_name='a main_ppo run'\n")
    assert status == 0 and output.count("hybridrl train") == 2
    assert "trainer.nnodes=3" in printed(f"hybridrl train{output.split('hybridrl train')[1]}")
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_the_script_s_own_arguments_are_named_unless_they_are_given(migrate):
    output = migrate(f'# "$@"\n{RUN} {MODEL} "$@"\n')[1]
    assert "run.sh adds its own arguments ($@), of which there are none here" in output and "[default]" in output
    keys = "rollout.tensor_model_parallel_size=1 trainer.logger=[console] trainer.n_gpus_per_node=8 trainer.save_freq=5"
    given = migrate(f'{RUN} {MODEL} {keys} "$@"\n', "rollout.n=4")[1]
    assert "[arguments]" not in given + migrate(f"# $@\n{RUN} {MODEL}\n")[1]
    assert "[default]" not in given, "there is a line only if one of them matters"


def test_a_program_that_only_probes_has_no_output(migrate):
    output = migrate(
        "DEVICE=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo cuda)\n"
        'GPUS="$(nvidia-smi -L | wc -l)"\n'
        f"{RUN} {MODEL} trainer.device=$DEVICE trainer.n_gpus_per_node=$GPUS\n"
    )[1]
    assert "trainer.device=cuda" in printed(output)
    assert "# warning [empty-value] trainer.n_gpus_per_node is empty: a variable that is not set here" in output


@pytest.mark.parametrize(
    "module", ["verl_tool.trainer.main_ppo", "recipe.spin.main_spin", "search.agents.train", "train_it.py"]
)
def test_a_fork_s_program_is_read_like_one_with_code_of_its_own(migrate, module):
    run = module if module.endswith(".py") else f"-m {module}"
    status, output = migrate(f"PYTHONUNBUFFERED=1 python3 {run} {MODEL} rollout.n=4\n")
    assert status == 0 and f"# warning [program] {module} has code of its own" in output
    assert "actor_rollout_ref.rollout.n=4" in printed(output)


def test_the_programs_that_run_are_named_if_none_trains(migrate):
    status, output = migrate(
        f"python3 -m verl.trainer.main_generation_server {MODEL}\npython3 prepare/gsm8k.py --out x\nbash ./other.sh 1\n"
    )
    assert status == 2
    assert "; it runs verl.trainer.main_generation_server, prepare/gsm8k.py, ./other.sh" in " ".join(output.split())


def test_what_changes_nothing_is_named_in_one_line(migrate):
    output = migrate(
        f"{RUN} {MODEL} trainer.critic_warmup=0 trainer.balance_batch=true "
        "data.return_raw_chat=True distillation.nnodes=0 "
        "data.continuous_token.enable=true actor_rollout_ref.model.lora.rank=null\n"
    )[1]
    (line,) = [line for line in output.splitlines() if "left-out" in line]
    assert "trainer.critic_warmup" not in line  # it is in the command
    assert "trainer.balance_batch=true (rows are always balanced over the devices by their lengths)" in line
    assert "data.return_raw_chat=True (" in line
    assert "distillation.nnodes=0" in line and "actor_rollout_ref.model.lora.rank=null" in line
    assert "data.continuous_token.enable=true (responses always stay token ids" in line


def test_a_value_that_only_the_shell_quotes_gets_quotes_for_hydra(migrate):
    status, output = migrate(f'{RUN} {MODEL} trainer.experiment_name="len > 512 run" > a.log 2>&1\n')
    assert status == 0 and "# info [quoted] trainer.experiment_name='len > 512 run' has quotes in the command" in output
    assert "trainer.experiment_name='len > 512 run'" in printed(output)


def test_a_command_that_is_a_text_runs_without_its_redirections(migrate):
    output = migrate(
        f"CMD='{RUN} {MODEL} trainer.project_name=\"a_b\"'\n"
        "CMD+=' \"+own.text=len > 3\" > train.log 2>&1'\n"
        'eval "$CMD"\neval $CMD rollout.n=3\n'
    )[1]
    first, second = (printed(f"hybridrl train{part}") for part in output.split("hybridrl train")[1:])
    assert {"trainer.project_name=a_b", "own.text='len > 3'"} <= {*first} & {*second}
    assert "actor_rollout_ref.rollout.n=3" in second


WAITING = """
(while true; do nvidia-smi >> gpu.log; sleep 60; done) &
until curl -s localhost:8000/health; do sleep 1; done
PY=/usr/bin/python3
nohup "$PY" -m verl.trainer.main_ppo {model} trainer.experiment_name=first < /dev/null &> a.log & pid=$!
while kill -0 $pid; do sleep 30; done
while true; do if [ -f done ]; then break; fi; sleep 5; done
while wait -n; do :; done
for n in 4 8; do $PY -m verl.trainer.main_ppo {model} rollout.n=$n & sleep 1; done; wait
"""


def test_a_script_that_waits_for_its_programs_is_read_to_its_end(migrate):
    output = migrate(WAITING.format(model=MODEL))[1]
    assert "trainer.experiment_name=first" in output and "incomplete" not in output
    assert ["actor_rollout_ref.rollout.n=4" in output, "actor_rollout_ref.rollout.n=8" in output] == [True, True]
    assert output.count("hybridrl train") == 3


@pytest.mark.parametrize(
    ("loop", "nodes"),
    [
        (f"for n in 1 2 3; do {RUN} trainer.nnodes=$n || sleep 5; done", "1 2 3"),
        (f"for n in 1 2 3; do [ $n = 1 ] || sleep 5\n{RUN} trainer.nnodes=$n; done", "1 2 3"),
        (f"for n in 1 2 3; do false && sleep 5\n{RUN} trainer.nnodes=$n; done", "1 2 3"),
        (f"for n in 1 2 3; do ! sleep 5 || {RUN} trainer.nnodes=$n; done", "1 2 3"),
        (f"for n in 1 2 3; do sleep 5 & {RUN} trainer.nnodes=$n; done", "1 2 3"),
        (f"for n in 1 2 3; do {{ {RUN} trainer.nnodes=$n; sleep 5; }}; done", "1 2 3"),
        (f"for n in 1 2 3; do if sleep 5; then {RUN} trainer.nnodes=$n; fi; done", "1 2 3"),
        (f"for n in 1 2 3; do (sleep 5; {RUN} trainer.nnodes=$n); sleep 5 | cat; done", "1 2 3"),
        (f"for n in 1 2 3; do WAIT=5 sleep '#5' \"it's\" || continue; {RUN} trainer.nnodes=$n; done", "1 2 3"),
        (f"n=1; while sleep 1; do {RUN} trainer.nnodes=$n; done; {RUN} trainer.nnodes=2", "1 2"),
        (f"until program; do sleep 5; done; {RUN} trainer.nnodes=1", "1"),
        (f"while ! program || sleep 5; do sleep 5 && continue; done; {RUN} trainer.nnodes=1", "1"),
        (f"while true; do program || sleep 5; done; {RUN} trainer.nnodes=1", "1"),
        (f"while true; do {{ program; sleep 5; }}; done; {RUN} trainer.nnodes=1", "1"),
    ],
)
def test_a_sleep_is_one_command_that_succeeds(script, loop, nodes):
    script.write_text(f"{loop}\n")
    commands, stopped, _ = launches.commands_of(script)
    found = dict.fromkeys(words[-1].partition("=")[2] for words in commands if words[0] == "python3")
    assert [" ".join(found), stopped] == [nodes, ""]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "echo " + "(" * 1500),
        ("run.sh", f"eval '{'(' * 1500}'"),
        ("run.sh", f"{RUN} trainer.experiment_name={'[' * 700}{']' * 700}"),
        ("run.yaml", f"a: {'[' * 3000}"),
    ],
)
def test_what_is_nested_too_deeply_is_refused(doctor, tmp_path, name, text):
    (tmp_path / name).write_text(f"{text}\n")
    status, output = doctor("migrate", str(tmp_path / name))
    assert status == 2 and "nested too deeply to be read" in output


@pytest.mark.parametrize("text", ["#" * 100_001, "printf -v zeros %0100001d 0; eval $zeros"])
def test_a_script_or_a_command_in_it_that_is_too_large_is_not_read(script, monkeypatch, text):
    read: list[str] = []
    monkeypatch.setattr(launches, "without_files", lambda text, sums: read.append(text) or text)
    script.write_text(f"{text}\n")
    with pytest.raises(ValueError, match="larger than 100000 bytes"):
        launches.commands_of(script)
    assert max(map(len, read), default=0) < 100_000


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("while :; do :; done", "run.sh within 1 s"),
        ("x=${NOT_SET:?is required}", "NOT_SET: is required"),
    ],
)
def test_runs_before_the_place_where_bash_stops_are_read(migrate, ends_soon, end, why):
    output = migrate(f"{RUN} {MODEL}\n{end}\n")[1]
    assert "# warning [incomplete] " in output and "so runs after that are missing: " in output and why in output
    assert printed(output) == MODEL.split()


def test_verl_s_switch_to_uv_is_left_out(migrate):
    status, output = migrate(
        "LAUNCH=(uv run --frozen --all-packages --extra vllm python3)\n"
        'RAY=(ray_kwargs.ray_init.runtime_env.py_executable="uv -v run --frozen --all-packages --extra vllm")\n'
        f'"${{LAUNCH[@]}}" -m verl.trainer.main_ppo {MODEL} "${{RAY[@]}}"\n'
    )
    assert status == 0
    assert "# warning [ignored-key] ray_kwargs.ray_init.runtime_env.py_executable has no effect: it starts" in output
    assert not [word for word in printed(output) if "uv" in word]


def test_a_settings_file_is_read_and_the_command_wins(migrate, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "multi.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "data: {train_files: rows.parquet, max_response_length: 64, unheard_of: 1}\n"
        "actor_rollout_ref: {rollout: {n: 4, name: trtllm, response_length: '${data.max_response_length}'}}\n"
        "reward_model: {reward_manager: dapo}\n"
    )
    status, output = migrate(
        'python3 -m verl.trainer.main_ppo --config-path="$(dirname "$0")/config" --config-name=multi '
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.n=8\n"
    )
    assert printed(output) == [
        "data.train_files=rows.parquet",
        "data.max_response_length=64",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.response_length='${data.max_response_length}'",
        "reward.reward_manager.name=dapo",
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    ]
    assert status == 1 and "# error [unknown-key]" in output and "unknown key data.unheard_of" in output
    assert "# error [value] actor_rollout_ref.rollout.name=trtllm: choose sglang | vllm" in output


def test_a_missing_settings_file_is_reported(migrate):
    status, output = migrate(f"{RUN} --config-name multi {MODEL}\n")
    missing = "multi: this settings file was not found, so none of its values are in the command"
    assert status == 1 and f"# error [config-file] {missing}" in output
    assert migrate(f"{RUN} --config-name=ppo_trainer {MODEL}\n")[0] == 0


def test_rejected_settings_are_left_out_until_the_command_is_accepted(migrate):
    status, output = migrate(
        f"{RUN} --config-path=c {MODEL} actor_rollout_ref.actor.strategy=megatron "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
        "actor_rollout_ref.ref.megatron.param_offload=True actor_rollout_ref.actor.megatron.a=1 "
        "actor_rollout_ref.actor.megatron.b=1 actor_rollout_ref.actor.megatron.c=1 "
        "actor_rollout_ref.actor.megatron.d=1 actor_rollout_ref.actor.megatron.e=1 "
        "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True trainer.device=npu\n"
    )
    assert printed(output) == [
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "data.train_files=a.parquet",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    ]
    assert status == 1
    assert output.count(".megatron.") == 7  # each is named, in one line only
    assert "and 1 more: " in output and "left-out" not in output


@pytest.mark.parametrize("module", ["recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo", "dapo.main_dapo"])
def test_dapo_s_program_is_known(migrate, module):
    status, output = migrate(f"python3 -m {module} {MODEL} +algorithm.filter_groups.enable=True\n")
    assert status == 0
    assert "reward.reward_manager.name=dapo" in printed(output)


def test_supervised_training_becomes_a_command_for_main_sft(migrate):
    status, output = migrate(
        "torchrun --standalone --nnodes=1 --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer "
        "data.train_files=a.parquet model.partial_pretrain=Qwen/Qwen3-8B optim.clip_grad=0.5 "
        "ulysses_sequence_parallel_size=2 use_remove_padding=true data.micro_batch_size_per_gpu=4\n",
        "4",
    )
    assert printed(output, "sft") == [
        "trainer.n_gpus_per_node=4",
        "data.train_files=a.parquet",
        "model.path=Qwen/Qwen3-8B",
        "engine.grad_clip=0.5",
        "engine.ulysses_sequence_parallel_size=2",
        "model.use_remove_padding=true",
    ]
    assert status == 0 and "# info [default] other defaults of keys that the script does not set: " in output


def test_a_rejected_choice_of_a_section_leaves_its_keys_in_the_command(migrate):
    status, output = migrate(
        "torchrun -m verl.trainer.sft_trainer model.path=m data.train_files=a.parquet optim=megatron optim.lr=1e-4\n"
    )
    assert status == 1 and "# error [unsupported] optim=megatron: " in output
    assert printed(output, "sft") == ["model.path=m", "data.train_files=a.parquet", "optim.lr=1e-4"]


def test_a_script_of_skyrl_becomes_a_command_for_hybridrl(migrate):
    status, output = migrate(
        "uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base data.train_data=\"['$HOME/a.parquet']\" "
        "trainer.policy.model.path=Qwen/Qwen3-8B trainer.algorithm.use_kl_loss=false generator.max_turns=3 "
        "generator.n_samples_per_prompt=8 trainer.logger=wandb trainer.fully_async.simulate_training=true\n"
    )
    words = printed(output)
    assert {"actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_kl_loss=false"} <= set(words)
    assert "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3" in words
    assert "algorithm.adv_estimator=grpo" in words  # SkyRL's default, which differs from hybridrl's
    assert "# info [default] SkyRL's defaults are added to the command below: " in output
    assert " algorithm.adv_estimator=gae here, grpo in SkyRL" in output
    assert status == 1 and output.count("# error") == 1


AREAL = """
experiment_name: gsm8k
trial_name: trial0
total_train_epochs: 10
allocation_mode: sglang:d2p1t2+d4p1t1
cluster: {n_gpus_per_node: 8, name_resolve: {type: nfs}}
gconfig: {n_samples: 4, max_new_tokens: 1024}
actor:
  path: Qwen/Qwen3-8B
  ppo_n_minibatches: 1
  group_size: ${gconfig.n_samples}
  optimizer: {lr: 1.7e-5, type: adam}
  reward_norm: {mean_level: group, std_level: group}
ref: {path: '${actor.path}', dtype: bfloat16}
train_dataset: {path: openai/gsm8k, batch_size: 256, type: rl}
saver: {freq_epochs: 1, freq_steps: null}
sglang: {model_path: '${actor.path}', random_seed: 1, mem_fraction_static: 0.8, schedule_policy: lpm, page_size: null}
vllm: {model: '${actor.path}', gpu_memory_utilization: 0.9}
"""


def test_areal_s_yaml_is_read_with_and_without_its_script(migrate, doctor, tmp_path):
    (tmp_path / "grpo.yaml").write_text(AREAL)
    line = "python3 examples/gsm8k_rl.py --config grpo.yaml scheduler.type=local actor.path=Qwen/Qwen3-0.6B"
    status, output = migrate(f"{line}\n")
    words = printed(output)
    assert status == 0
    assert {
        "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B",
        "actor_rollout_ref.ref.model.path=Qwen/Qwen3-0.6B",
        "actor_rollout_ref.rollout.n=4",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.8",
        "actor_rollout_ref.rollout.engine_kwargs.sglang.schedule_policy=lpm",
        "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
        "algorithm.adv_estimator=grpo",
        "trainer.save_freq_epochs=1",
    } <= set(words)
    assert "# warning [program] examples/gsm8k_rl.py has code of its own (rewards, rollouts)" in output
    alone = printed(doctor("migrate", str(tmp_path / "grpo.yaml"))[1])
    assert [word.replace("8B", "0.6B") for word in alone] == words


@pytest.mark.parametrize(
    ("command", "set_here"),
    [
        (
            "verl.experimental.fully_async_policy.fully_async_main --config-path=config "
            f"--config-name=fully_async_ppo_trainer.yaml {MODEL} data.train_batch_size=0 "
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            {"trainer.v1.sampler.max_off_policy_threshold=1", "data.train_batch_size=32"},
        ),
        (
            f"verl.experimental.one_step_off_policy.main_ppo {MODEL} data.train_batch_size=512",
            {"trainer.v1.sampler.max_off_policy_threshold=1", "data.train_batch_size=512"},
        ),
        (
            "examples.train.async.main_async data.train_data=a.parquet trainer.policy.model.path=m "
            "trainer.placement.colocate_all=false",
            {"trainer.v1.sampler.max_off_policy_threshold=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"},
        ),
    ],
)
def test_an_asynchronous_program_has_devices_of_its_own_for_rollout(migrate, command, set_here):
    status, output = migrate(f"python3 -m {command}\n")
    words = printed(output)
    assert status == 0
    assert {"trainer.v1.trainer_mode=separate_async", *set_here} <= {*words}
    assert len({word.partition("=")[0] for word in words}) == len(words)
