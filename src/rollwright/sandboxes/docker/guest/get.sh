# Writes a file, or LIMIT bytes of it from OFFSET on, to stdout. LIMIT `-`: to the end.
#
#   sh -c THIS rollwright PATH OFFSET LIMIT MOST
#
# Ends with 11: not there, 12: not a plain file, 13: more than MOST bytes.
if [ ! -e "$1" ]; then
    echo "$1 does not exist" >&2
    exit 11
fi
if [ ! -f "$1" ]; then
    echo "$1 is not a plain file" >&2
    exit 12
fi
limit=$3
if [ "$limit" = - ]; then
    size=$(stat -L -c %s "$1") || exit 1
    limit=$((size > $2 ? size - $2 : 0))
fi
[ "$limit" -le "$4" ] || exit 13
if [ "$2" -eq 0 ]; then
    head -c "$limit" "$1"
else
    tail -c "+$(($2 + 1))" "$1" | head -c "$limit"
fi
