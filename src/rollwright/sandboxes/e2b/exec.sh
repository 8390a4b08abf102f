#!/bin/sh
# Runs one short command once, however often it is asked to, and answers every time with what came out of it.
#
#   sh exec.sh NONCE SECONDS USER CWD INPUT SIZE FORGET ARGV...
#
# SECONDS is a whole number. INPUT is an uploaded file of SIZE bytes that becomes the command's stdin, or empty. FORGET
# is a list of nonces, separated by commas, whose output the client has. The answer is one line,
# `rollwright-exec 1 NONCE STATE CODE OUT ERR`, then OUT bytes of stdout and ERR bytes of stderr together in base64.
# STATE is exited, timeout, big (too much output to be told), torn (the input is not whole), or lost.
# A nonce is claimed by making its folder, which stays. Every program that is started here costs each command a
# millisecond or more, so there are few.
set -u
umask 077
root=${0%/*}
nonce=$1 seconds=$2 user=$3 cwd=$4 input=$5 size=$6 forget=$7
shift 7
dir=$root/exec/$nonce
limit=16777216

answer() { # STATE CODE
    out=0 err=0
    [ ! -s "$dir/out" ] || out=$(wc -c <"$dir/out")
    [ ! -s "$dir/err" ] || err=$(wc -c <"$dir/err")
    if [ $((out + err)) -gt $limit ]; then
        echo "rollwright-exec 1 $nonce big $2 $((out)) $((err))"
        exit 0
    fi
    echo "rollwright-exec 1 $nonce $1 $2 $((out)) $((err))"
    if [ $((err)) -eq 0 ]; then
        [ $((out)) -eq 0 ] || base64 <"$dir/out"
    else
        cat "$dir/out" "$dir/err" | base64
    fi
    exit 0
}

wait_for_the_other() {
    [ -z "$input" ] || rm -f "$input"
    tries=0
    until { read -r state code <"$dir/end"; } 2>/dev/null; do
        [ -d "$dir" ] || answer torn 0
        tries=$((tries + 1))
        [ $tries -le $((seconds * 10 + 50)) ] || answer lost 0
        sleep 0.1
    done
    answer "$state" "$code"
}

find_user() { # -> $uid $gid $home
    uid= gid= home=/
    while IFS=: read -r name _ number group _ folder _; do
        if [ "$name" = "$user" ]; then
            uid=$number gid=$group home=$folder
        fi
    done </etc/passwd
}

start() { # ARGV..., in place of this subshell
    cd "$cwd" || exit 126
    umask 022
    export HOME="$home" USER="$user" LOGNAME="$user"
    if [ "$user" = root ]; then
        exec setsid timeout -s KILL "$seconds" "$@"
    elif [ "$dropper" = setpriv ]; then
        set -- setpriv --reuid="$uid" --regid="$gid" --clear-groups --no-new-privs "$@"
        exec setsid timeout -s KILL "$seconds" "$@"
    else
        exec setsid timeout -s KILL "$seconds" su -s /bin/sh -c 'exec "$@"' -- "$user" sh "$@"
    fi
}

read_clock() { # -> $now, hundredths of a second since boot
    read -r uptime _ </proc/uptime
    now=$((${uptime%.*} * 100 + 1${uptime#*.} - 100))
}

if [ "$forget" ]; then
    (
        cd "$root/exec" || exit
        IFS=,
        set --
        for told in $forget; do
            set -- "$@" "$told/in" "$told/out" "$told/err"
        done
        rm -f "$@"
    )
fi

mkdir "$dir" 2>/dev/null || wait_for_the_other
stdin=/dev/null
if [ "$input" ]; then
    # Taken away, so that the same upload coming again cannot change it under the command that reads it. Never onto
    # another file system: a big input lies where there is room for it.
    case $input in "$root"/*) stdin=$dir/in ;; *) stdin=$input.taken ;; esac
    if ! mv "$input" "$stdin" 2>/dev/null || [ "$(wc -c <"$stdin")" -ne "$size" ]; then
        rm -rf "$dir" "$stdin"
        answer torn 0
    fi
fi

find_user
# What the login shell's profile did to PATH is not the image's wish.
{ read -r dropper && read -r PATH; } <"$root/found"

read_clock
late=$((now + seconds * 100))
(start "$@") <"$stdin" >"$dir/out" 2>"$dir/err" &
child=$!
wait $child
code=$?
state=exited
read_clock
case $stdin in *.taken) rm -f "$stdin" ;; esac
if [ $code -eq 137 ] && [ $now -ge $late ]; then
    state=timeout
    kill -KILL "-$child" 2>/dev/null
fi
echo "$state $code" >"$dir/end"
answer $state $code
