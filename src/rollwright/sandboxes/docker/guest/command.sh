# One command, which starts when a nonce comes in on stdin, and whose end both streams tell by that nonce.
#
#   sh -c THIS rollwright CWD ARGV...
#
# Until the nonce is there nothing has happened, so a connection that was cut before may simply be made again. The end
# is told by us, because the streams stay open for as long as anything that the command left behind holds them.
IFS= read -r nonce || exit 125
[ "$nonce" ] || exit 125
echo $$
(
    unset nonce
    cd "$1" || exit 126
    shift
    exec "$@"
)
code=$?
echo "$nonce $code"
echo "$nonce $code" >&2
