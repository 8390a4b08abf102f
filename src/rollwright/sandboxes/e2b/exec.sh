#!/bin/sh
# Runs one short command once, however often it is asked to, and answers every time with what came out of it.
#
#   sh exec.sh NONCE SECONDS USER CWD INPUT SIZE FORGET ARGV...
#
# SECONDS may be a fraction. INPUT is an uploaded file of SIZE bytes that becomes the command's stdin, or empty. FORGET
# is a list of nonces, separated by commas, whose output the client has. The answer is one line,
# `rollwright-exec 1 NONCE STATE CODE OUT ERR`, then OUT bytes of stdout and ERR bytes of stderr together in base64.
# STATE is exited, timeout, big (too much output to be told), torn (the input is not whole), or lost.
# A nonce is claimed by making its folder, which stays.
set -u
umask 077
root=${0%/*}
nonce=$1 seconds=$2 user=$3 cwd=$4 input=$5 size=$6 forget=$7
shift 7
dir=$root/exec/$nonce
limit=16777216

while [ "$forget" ]; do
    rm -f "$root/exec/${forget%%,*}/out" "$root/exec/${forget%%,*}/err"
    case $forget in *,*) forget=${forget#*,} ;; *) forget= ;; esac
done

answer() { # STATE CODE
    out=0 err=0
    [ ! -s "$dir/out" ] || out=$(wc -c <"$dir/out")
    [ ! -s "$dir/err" ] || err=$(wc -c <"$dir/err")
    if [ $((out + err)) -gt $limit ]; then
        echo "rollwright-exec 1 $nonce big $2 $((out)) $((err))"
    else
        echo "rollwright-exec 1 $nonce $1 $2 $((out)) $((err))"
        [ $((out + err)) -eq 0 ] || cat "$dir/out" "$dir/err" | base64
    fi
    exit 0
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
        exec setsid "$@"
    elif setpriv --reuid=0 true 2>/dev/null; then
        exec setsid setpriv --reuid="$uid" --regid="$gid" --clear-groups --no-new-privs "$@"
    else
        exec setsid su -s /bin/sh -c 'exec "$@"' -- "$user" sh "$@"
    fi
}

# The input is taken away first: a request that comes twice cannot change it under the command that reads it.
stdin=/dev/null
if [ "$input" ] && [ ! -d "$dir" ]; then
    stdin=$input.$$
    if ! mv "$input" "$stdin" 2>/dev/null || [ "$(wc -c <"$stdin")" -ne "$size" ]; then
        rm -f "$stdin"
        [ -d "$dir" ] || answer torn 0
    fi
fi

if ! mkdir "$dir" 2>/dev/null; then
    [ "$stdin" = /dev/null ] || rm -f "$stdin"
    tries=0
    while [ ! -f "$dir/end" ]; do
        tries=$((tries + 1))
        [ $tries -le $((${seconds%.*} * 10 + 50)) ] || answer lost 0
        sleep 0.1
    done
    read -r state code <"$dir/end"
    answer "$state" "$code"
fi

find_user
# What the login shell's profile did to PATH is not the image's wish.
path=$(tr '\0' '\n' 2>/dev/null <"/proc/$PPID/environ" | sed -n 's/^PATH=//p')
[ -z "$path" ] || PATH=$path

(start "$@") <"$stdin" >"$dir/out" 2>"$dir/err" &
child=$!
(exec setsid sh -c 'sleep "$1"; : >"$2/late"; kill -KILL "-$3"' sh "$seconds" "$dir" "$child") </dev/null >/dev/null 2>&1 &
timer=$!
wait $child
code=$?
kill -KILL "-$timer" 2>/dev/null || kill -KILL $timer 2>/dev/null
[ "$stdin" = /dev/null ] || rm -f "$stdin"
state=exited
[ ! -f "$dir/late" ] || state=timeout
echo "$state $code" >"$dir/end.new"
mv "$dir/end.new" "$dir/end"
answer $state $code
