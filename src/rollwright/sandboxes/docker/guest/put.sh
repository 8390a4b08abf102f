# Writes stdin to a file as a whole or not at all.
#
#   sh -c THIS rollwright PATH SIZE MODE NONCE
#
# Ends with 11: no such folder and none could be made, 12: a folder is there, 13: not allowed, 14: less than SIZE bytes
# came, 15: it does not fit.
umask 022
folder=${1%/*}
mkdir -p "${folder:-/}" || exit 11
if [ -d "$1" ] && [ ! -h "$1" ]; then
    echo "$1 is a folder" >&2
    exit 12
fi
new=$folder/.rollwright.$4
umask 077
true >"$new" || exit 13
fail() {
    rm -f "$new"
    exit "$1"
}
cat >"$new" || fail 15
[ "$(wc -c <"$new")" -eq "$2" ] || fail 14
chmod "$3" "$new" || fail 13
# A link to a folder is replaced, not followed; not every mv can be told so.
mv -fT "$new" "$1" 2>/dev/null || mv -f "$new" "$1" || fail 13
