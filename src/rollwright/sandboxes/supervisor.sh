#!/bin/sh
# Keeps one job: runs it once, ends it in time with all it started, and never loses how it ended.
#
#   sh supervisor.sh start ID WAIT SIZE SECONDS IDLE GRACE HEAD TAIL MERGE KEEP USER MOST   (the job's script on stdin)
#   sh supervisor.sh wait ID WAIT
#   sh supervisor.sh cancel ID WAIT
#   sh supervisor.sh forget ID WAIT
#
# SECONDS, IDLE (0: none) and GRACE are hundredths of a second, WAIT is whole seconds, HEAD, TAIL and MOST (0: no limit)
# are bytes of each stream. Every call answers one line,
# `rollwright-job 1 ID STATE CODE SIGNAL STARTED ENDED SURVIVORS OUT ERR INLINE`, and, with INLINE 1, the captured bytes.
#
# A job is a folder that is made once (mkdir is the claim) and never removed; `forget` leaves the claim in it alone. Its own process is either a child
# (found again by session and environment) or a *cell*: a nested PID namespace whose first process was started for us
# (ROLLWRIGHT_CELL is its pid, descriptor 8 its command pipe; it dies when we do, and 5 ends when it does). Without a cell, ROLLWRIGHT_REAPER
# may name a tini: as our parent and subreaper it gets the job's orphans, so that none is lost from sight. Or, with
# ROLLWRIGHT_NEST, the child is an `unshare` whose own child is the first process of a PID namespace: we again (`nested`).
# `record` is a FIFO that the supervisor holds open while the job runs (so its end wakes the waiters), and becomes the
# exit record by one rename. Descriptors here: 3 and 4 `out` and `err`, 6 `record`, 7 the script, 8 the cell, 9 `events`.
set -u
umask 022
root=${0%/*}
op=$1
id=$2
dir=$root/jobs/$id
user=root
cell=${ROLLWRIGHT_CELL:-}
reaper=${ROLLWRIGHT_REAPER:-}
nest=${ROLLWRIGHT_NEST:-}
unset ROLLWRIGHT_CELL ROLLWRIGHT_REAPER ROLLWRIGHT_NEST
parent= waiter=
inline_limit=262144

read_clock() { # -> $now, hundredths of a second since boot
    read -r uptime _ </proc/uptime
    now=$((${uptime%.*} * 100 + 1${uptime#*.} - 100))
}

start_time() { # PID -> $started and its process $group, or 1 when there is none
    { read -r line </proc/"$1"/stat; } 2>/dev/null || return 1
    started=${line##*) }
    set -- $started
    case $1 in Z | X) return 1 ;; esac
    group=$3
    started=${20}
}

nap() { # hundredths of a second, fewer than a hundred
    centi=$((100 + $1))
    sleep "0.${centi#1}"
}

# ---------------------------------------------------------------- asking

alive() {
    tries=0
    until { read -r pid born boot user <"$dir/supervisor"; } 2>/dev/null && [ "$user" ]; do
        tries=$((tries + 1))
        [ $tries -le 100 ] || return 1
        nap 2
    done
    read -r this_boot </proc/sys/kernel/random/boot_id
    [ "$boot" = "$this_boot" ] && start_time "$pid" && [ "$started" = "$born" ]
}

decide() { # once for each job: it begins, or it is lost; fails for who comes second
    set -C
    { true >"$dir/decided"; } 2>/dev/null
    first=$?
    set +C
    return $first
}

wait_for() { # seconds
    left=$1
    # In short steps: who opens the FIFO just after a supervisor was killed would not be woken.
    while [ "$left" -gt 0 ] && [ ! -f "$dir/record" ] && alive; do
        timeout $((left > 2 ? 2 : left)) cat "$dir/record" >/dev/null 2>&1
        left=$((left - 2))
    done
}

answer() {
    if [ ! -f "$dir/record" ]; then
        if [ ! -d "$dir" ]; then
            echo "rollwright-job 1 $id absent 0 0 0 0 0 0 0 0"
            return
        elif alive || { ! decide && alive; }; then
            echo "rollwright-job 1 $id running 0 0 0 0 0 0 0 0"
            return
        elif [ ! -f "$dir/record" ]; then
            find_user
            kill_tree
            echo "rollwright-job 1 $id lost 0 0 0 0 0 0 0 0"
            return
        fi
    fi
    read -r record <"$dir/record"
    set -- $record
    if [ $(($8 + $9)) -le $inline_limit ]; then
        echo "rollwright-job 1 $record 1"
        shift 7
        [ $(($1 + $2)) -eq 0 ] || cat "$dir/out.head" "$dir/out.tail" "$dir/err.head" "$dir/err.tail" 2>/dev/null
    else
        echo "rollwright-job 1 $record 0"
    fi
}

prepare() {
    [ -d "$root/jobs" ] && return
    mkdir -p "$root/new" "$root/jobs"
    chmod 700 "$root"
}

start() { # WAIT SIZE, then what `run` takes
    wait=$1
    size=$2
    shift 2
    prepare
    if [ ! -d "$dir" ]; then
        script=$root/new/$id.$$
        cat >"$script"
        # A plain file on stdin was whole when it was given to us; a stream may have been cut.
        if [ ! -f /dev/stdin ] && [ "$(wc -c <"$script")" -ne "$size" ]; then
            rm -f "$script"
            echo "rollwright-job 1 $id torn 0 0 0 0 0 0 0 0"
            return
        fi
        # The supervisor lets go of our pipe as soon as the claim is decided.
        : "$(
            export ROLLWRIGHT_CELL="$cell" ROLLWRIGHT_REAPER="$reaper" ROLLWRIGHT_NEST="$nest"
            setsid sh "$0" run "$id" "$script" "$@" </dev/null 2>/dev/null &
        )"
    fi
    exec 5<&- 8>&-
    wait_for "$wait"
    answer
}

cancel() { # WAIT
    prepare
    if mkdir "$dir" 2>/dev/null; then
        read_clock
        echo "$id cancelled 0 15 $now $now 0 0 0" >"$dir/record.new"
        mv -f "$dir/record.new" "$dir/record"
    elif [ ! -f "$dir/record" ] && alive && [ -p "$dir/events" ]; then
        echo cancel 1<>"$dir/events"
        wait_for "$1"
    fi
    answer
}

forget() { # when the result is stored elsewhere: drop what was captured, and keep that the job has been
    if [ -d "$dir" ] && { [ -f "$dir/record" ] || ! alive; }; then
        echo "$id forgotten 0 0 0 0 0 0 0" >"$dir/record.new"
        mv -f "$dir/record.new" "$dir/record"
        for file in "$dir"/* "$root/new/$id".*; do
            [ "$file" = "$dir/record" ] || rm -f "$file"
        done
    fi
    answer
}

# ---------------------------------------------------------------- keeping

own_pid() { # FILE: note which process this subshell is, and will be after `exec`
    read -r pid _ </proc/self/stat
    echo "$pid" >"$1"
}

capture_rest() { # out|err, from stdin: what comes after the head
    (
        own_pid "$dir/$1.pid"
        exec tee "$dir/$1.copy" 2>/dev/null
    ) | {
        if [ "$tail" -gt 0 ]; then
            tail -c "$tail" >"$dir/$1.tail"
        else
            cat >/dev/null
        fi
    }
}

capture() { # out|err, from stdin; reads for ever, so that the job never blocks on us
    total=0
    full=0
    [ "$most" -eq 0 ] || [ "$head" -le "$most" ] || head=$most
    if [ "$head" -gt 0 ]; then
        # Of all tools only this dd stops exactly there, whatever sizes a pipe gives.
        (
            own_pid "$dir/$1.pid"
            exec dd bs="$head" count=1 iflag=fullblock >"$dir/$1.head" 2>/dev/null
        ) || full=1
        [ ! -s "$dir/$1.head" ] || total=$(wc -c <"$dir/$1.head")
    fi
    if [ $full -eq 1 ] || [ "$total" -ge "$head" ]; then
        wc -c <"$dir/$1.copy" >"$dir/$1.rest" &
        if [ "$most" -gt 0 ] && [ $full -eq 0 ]; then
            # One byte too many tells that there were more.
            head -c $((most - total + 1)) | capture_rest "$1"
        else
            capture_rest "$1"
        fi
        wait $!
        read -r rest <"$dir/$1.rest"
        total=$((total + rest))
    fi
    if [ "$most" -gt 0 ] && [ "$total" -gt "$most" ]; then
        # Never blocks, also when nobody reads there any more.
        echo output_limit 1<>"$dir/events"
        total=$((total + $(wc -c)))
    fi
    echo "$total" >"$dir/$1.total"
}

start_capture() { # out|err
    {
        exec 3>&- 4>&- 6>&- 8>&- 9>&-
        if [ "$front" = 1 ]; then
            (
                own_pid "$dir/$1.front"
                exec dd bs=65536 2>/dev/null
            ) | capture "$1"
        else
            capture "$1"
        fi
    } <&5 &
}

total() { # out|err -> $total, the bytes the job wrote
    { read -r total <"$dir/$1.total"; } 2>/dev/null ||
        total=$(cat "$dir/$1.head" "$dir/$1.tail" 2>/dev/null | wc -c)
}

progress() { # -> $progress, which changes when the job wrote something
    progress=
    for stream in out err; do
        { read -r pid <"$dir/$stream.pid"; } 2>/dev/null || continue
        { read -r _ count </proc/"$pid"/io; } 2>/dev/null && progress="$progress $count"
    done
}

ooms() { # -> $ooms, the out-of-memory kills of this machine so far
    ooms=0
    for file in "$root/oom" /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        [ -r "$file" ] || continue
        while read -r name count; do
            [ "$name" != oom_kill ] || ooms=$count
        done <"$file"
        return
    done
}

tick_in() { # hundredths of a second; a cell counts by itself
    if [ "$cell" ]; then
        echo "tick $1" >&8
        return
    fi
    # Waits on `record`, so that it ends with us, however we end.
    centi=$((100 + $1 % 100))
    step=$(($1 / 100)).${centi#1}
    {
        exec 3>&- 4>&- 6>&- 8>&-
        timeout "$step" cat "$dir/record" >/dev/null 2>&1
        echo tick >&9
    } &
}

look_again() { # when the next deadline comes, and in 5 seconds at the latest
    step=500
    [ "$idle" -eq 0 ] || [ $((idle / 5)) -ge "$step" ] || step=$((idle / 5))
    [ $((deadline - now)) -ge "$step" ] || step=$((deadline - now))
    tick_in $((step > 2 ? step : 2))
}

find_user() { # -> $uid $gid $home
    uid= gid= home=/
    while IFS=: read -r name _ number group _ folder _; do
        if [ "$name" = "$user" ]; then
            uid=$number gid=$group home=$folder
        fi
    done </etc/passwd
}

as_user() { # COMMAND LINE: become the job's user and run it
    if [ "$user" = root ] || [ "$(id -u)" -ne 0 ]; then
        exec sh -c "$1"
    elif setpriv --reuid=0 true 2>/dev/null; then
        exec setpriv --reuid="$uid" --regid="$gid" --clear-groups --no-new-privs sh -c "$1"
    else
        exec su -s /bin/sh "$user" -c "$1"
    fi
}

launch_child() {
    find_user
    stdin=$dir/stdin
    [ -f "$stdin" ] || stdin=/dev/null
    {
        (
            exec 3>&- 4>&- 6>&- 8>&- 9>&- 7<"$script" <"$stdin" >"$dir/out"
            if [ "$merge" = 1 ]; then exec 2>&1; else exec 2>"$dir/err"; fi
            { echo 500 >/proc/self/oom_score_adj; } 2>/dev/null
            export HOME="$home" USER="$user" LOGNAME="$user"
            # What has no ROLLWRIGHT_JOB gets no TERM: with `unshare` all in its namespace would end at once.
            [ -z "$nest" ] || exec unshare --pid --fork --kill-child --mount-proc sh "$0" nested "$id" "$user"
            export ROLLWRIGHT_JOB="$id"
            as_user 'exec setsid sh /proc/self/fd/7'
        ) &
        started=
        start_time $!
        echo "$! $started" >"$dir/child"
        wait $!
        code=$?
        if [ $code -gt 128 ] && [ $code -le 192 ]; then
            echo "exit 0 $((code - 128))" >&9
        else
            echo "exit $code 0" >&9
        fi
    } 3>&- 4>&- 6>&- 8>&- &
    waiter=$!
}

nested() { # as the first process of a namespace: run the job; its other processes end with us
    find_user
    exec 5<&0
    (
        exec <&5 5<&-
        export ROLLWRIGHT_JOB="$id"
        as_user 'exec setsid sh /proc/self/fd/7'
    ) &
    exec 5<&- 7<&-
    wait $!
    exit $?
}

children_of() { # PID -> $children
    children=
    for file in /proc/"$1"/task/*/children; do
        line=
        { read -r line <"$file"; } 2>/dev/null
        children="$children $line"
    done
}

descendants() { # -> $members, all of them: orphans, which our parent gets, and what is below the job's first process
    members= todo=
    children_of "$parent"
    for pid in $children; do
        [ "$pid" = $$ ] || todo="$todo $pid"
    done
    children_of $$
    case " $children " in *" $waiter "*)
        children_of "$waiter"
        todo="$todo $children"
        ;;
    esac
    while [ "$todo" ]; do
        next=
        for pid in $todo; do
            start_time "$pid" || continue
            members="$members $pid"
            children_of "$pid"
            next="$next $children"
        done
        todo=$next
    done
}

members() { # -> $members, the job's processes, as far as their environment names them
    if [ "$parent" ]; then
        # Starts nothing, so it also works where the job has left no room for processes.
        descendants
        return
    fi
    scan="grep -lszF ROLLWRIGHT_JOB=$id /proc/[0-9]*/environ"
    members=
    # Without the power to trace, root sees only root's own environments. The user sees the rest.
    for path in $(
        exec 6>&- 8>&- 9>&-
        $scan
        [ "$user" = root ] || (as_user "$scan")
    ); do
        pid=${path#/proc/}
        pid=${pid%/environ}
        # Where root does see all, the user sees some of them again.
        case " $members " in *" $pid "*) continue ;; esac
        start_time "$pid" && members="$members $pid"
    done
}

kill_nest() { # with the first process of a namespace the kernel ends all in it, and `unshare` with that
    tries=0
    while { read -r child born <"$dir/child"; } 2>/dev/null && start_time "$child" && [ "$started" = "$born" ]; do
        children_of "$child"
        [ -z "$children" ] || kill -KILL $children 2>/dev/null
        tries=$((tries + 1))
        [ $tries -le 500 ] || break
        nap 1
    done
}

kill_tree() { # ends all that lives; -> $survivors
    survivors=0
    [ -z "$cell" ] || return
    [ ! -f "$dir/nest" ] || kill_nest
    tries=0
    while :; do
        { read -r child _ <"$dir/child"; } 2>/dev/null && kill -KILL "-$child" 2>/dev/null
        members
        [ "$members" ] || return
        kill -KILL $members 2>/dev/null
        tries=$((tries + 1))
        [ $tries -le 100 ] || break
        nap 2
    done
    set -- $members
    survivors=$#
}

end_cell() { # a cell that does not answer: the end of the pipe ends it, and the kernel all in it; -> $survivors
    survivors=0
    exec 8>&-
    tries=0
    while start_time "$cell"; do
        tries=$((tries + 1))
        if [ $tries -gt 500 ]; then
            survivors=1
            return
        fi
        nap 1
    done
}

stop() { # REASON
    [ "$reason" = exited ] || return
    reason=$1
    read_clock
    kill_at=$((now + grace))
    if [ "$cell" ]; then
        echo term >&8
    else
        { read -r child _ <"$dir/child"; } 2>/dev/null && kill -TERM "-$child" 2>/dev/null
        # Many programs take a second TERM for an order to drop everything, so nobody gets two.
        members
        others=
        for pid in $members; do
            start_time "$pid" && [ "$group" != "${child-}" ] && others="$others $pid"
        done
        [ -z "$others" ] || kill -TERM $others 2>/dev/null
    fi
    tick_in $((grace > 2 ? grace : 2))
}

release_captures() { # with $keep: end them although the job's children hold the pipe, and go on draining it
    streams=out
    [ "$merge" = 1 ] || streams='out err'
    # What the job has written is in the pipe. Let it be read: until nothing moves, or for half a second.
    tries=0
    while :; do
        progress
        before=$progress
        nap 5
        progress
        tries=$((tries + 1))
        [ "$progress" != "$before" ] || [ -z "$progress" ] || break
        [ $tries -lt 10 ] || break
    done
    for stream in $streams; do
        until { read -r pid <"$dir/$stream.front"; } 2>/dev/null && [ "$pid" ]; do nap 1; done
        start_time "$pid" || continue
        cat <"$dir/$stream" >/dev/null 2>&1 6>&- 8>&- 9>&- &
        kill "$pid"
    done
}

end_captures() { # who got out of sight may hold the pipe for ever: one survivor, for which the record does not wait
    tries=0 quiet=0
    progress
    before=$progress
    while start_time "$out" || { [ "$err" ] && start_time "$err"; }; do
        nap 1
        progress
        quiet=$((quiet + 1)) tries=$((tries + 1))
        [ "$progress" = "$before" ] || quiet=0
        before=$progress
        # Long enough for what the dead have left in the pipe, on any machine.
        [ $quiet -gt 200 ] || [ $tries -gt 400 ] || continue
        survivors=$((survivors + 1))
        for stream in out err; do
            { read -r pid <"$dir/$stream.front"; } 2>/dev/null && start_time "$pid" && kill "$pid"
        done
        return
    done
}

run() { # SCRIPT SECONDS IDLE GRACE HEAD TAIL MERGE KEEP USER MOST
    if ! mkdir "$dir"; then
        rm -f "$1"
        return
    fi
    [ -z "$reaper" ] || exec "$reaper" -s -- sh "$0" below "$id" "$@" >/dev/null
    look_after "$@"
}

look_after() { # the same
    script=$1 seconds=$2 idle=$3 grace=$4 head=$5 tail=$6 merge=$7 keep=$8 user=$9 most=${10:-0}
    # What the job leaves running needs a namespace that outlives it.
    [ "$keep" = 0 ] || nest=
    [ -z "$nest" ] || : >"$dir/nest"
    # Where some of a job may get out of sight, the captures must be able to end before it does.
    front=$keep
    [ "$cell$parent$nest" ] || front=1
    printf '%512s\n' '' >"$dir/record.new"
    mkfifo "$dir/record" "$dir/events" "$dir/out" "$dir/err" "$dir/out.copy" "$dir/err.copy"
    exec 6<>"$dir/record" 9<>"$dir/events"
    start_time $$
    read -r boot </proc/sys/kernel/random/boot_id
    echo "$$ $started $boot $user" >"$dir/supervisor"
    # So late that we were given up. Then nothing of the job may happen any more.
    decide || return
    exec >/dev/null
    # The cell may be gone when we write to it. That must not end us.
    trap : PIPE
    if [ "$cell" ]; then
        {
            exec 6>&- 8>&-
            read -r _ <&5
            echo dead >&9
        } &
        guard=$!
        exec 5<&-
    fi
    # While we hold these open nobody has to wait for the other side, and the captures are there before the job.
    exec 3<>"$dir/out" 4<>"$dir/err"
    [ ! -f "$root/stdin/$id" ] || mv "$root/stdin/$id" "$dir/stdin"

    exec 5<"$dir/out"
    start_capture out
    out=$!
    err=
    if [ "$merge" != 1 ]; then
        exec 5<"$dir/err"
        start_capture err
        err=$!
    fi
    exec 5<&-
    ooms
    ooms_before=$ooms
    read_clock
    begin=$now deadline=$((now + seconds)) heard=$now
    reason=exited code=0 signal=9 kill_at= answered=
    if [ "$cell" ]; then
        echo "go $dir $script $user $merge $keep" >&8
        look_again
    else
        # A job may leave no room for processes as soon as it begins.
        look_again
        launch_child
    fi
    progress
    last=$progress

    while read -r event a b <&9; do
        case $event in
        exit) # from a cell: and nothing of it is left
            code=$a signal=$b answered=1
            break
            ;;
        broken)
            reason=lost
            break
            ;;
        dead) # a cell that was killed, and told nothing
            [ $reason != exited ] || reason=lost
            break
            ;;
        cancel) stop cancelled ;;
        output_limit) stop output_limit ;;
        tick)
            read_clock
            progress
            [ "$progress" = "$last" ] || heard=$now
            last=$progress
            if [ "$kill_at" ]; then
                if [ $now -ge $kill_at ]; then
                    [ "$cell" ] && [ $now -lt $((kill_at + 500)) ] || break
                    echo kill >&8
                fi
                tick_in 2
            elif [ $now -ge $deadline ] || { [ "$idle" -gt 0 ] && [ $((now - heard)) -ge "$idle" ]; }; then
                stop timeout
            else
                look_again
            fi
            ;;
        esac
    done

    survivors=0
    exec 3>&- 4>&-
    if [ "$keep" = 1 ] && [ $reason = exited ]; then
        [ -z "$cell" ] || kill "$guard"
        release_captures
    elif [ "$cell" ]; then
        [ "$answered" ] || end_cell
    else
        kill_tree
        [ "$front" = 0 ] || end_captures
    fi
    wait $out $err
    read_clock
    total out
    out=$total
    total=0
    [ "$merge" = 1 ] || total err
    err=$total
    # It may have ended before we heard of it.
    if [ $reason = exited ] && [ "$most" -gt 0 ] && { [ "$out" -gt "$most" ] || [ "$err" -gt "$most" ]; }; then
        reason=output_limit
    fi
    ooms
    if { [ $reason = exited ] || [ $reason = lost ]; } && [ "$ooms" -gt "$ooms_before" ] && { [ "$signal" = 9 ] || [ "$code" = 137 ]; }; then
        reason=oom
    fi
    # Into the space reserved at the start, so that a full disk cannot lose it; whole or not at all.
    echo "$id $reason $code $signal $begin $now $survivors $out $err" 1<>"$dir/record.new"
    mv -f "$dir/record.new" "$dir/record"
}

shift 2
case $op in
start) start "$@" ;;
run) run "$@" ;;
below)
    parent=$PPID
    look_after "$@"
    ;;
nested)
    user=$1
    nested
    ;;
cancel) cancel "$@" ;;
forget) forget ;;
wait)
    wait_for "$1"
    answer
    ;;
esac
