# The main process of a container: ends, and with it all the rest, when the lease is over.
#
#   sh -c THIS NAME SECONDS
#
# A renewed lease is a file that holds the second since boot at which it ends.
read -r up _ </proc/uptime
end=$((${up%.*} + $1))
while :; do
    if [ -f /run/rollwright/lease ]; then read -r end </run/rollwright/lease; fi
    read -r up _ </proc/uptime
    left=$((end - ${up%.*}))
    [ "$left" -gt 0 ] || exit 0
    sleep $((left < 15 ? left : 15))
done
