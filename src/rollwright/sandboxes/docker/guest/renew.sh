# Moves the end of the lease that life.sh reads.
#
#   sh -c THIS rollwright SECONDS
read -r up _ </proc/uptime
echo $((${up%.*} + $1)) >/run/rollwright/lease.new && mv -f /run/rollwright/lease.new /run/rollwright/lease
