# What every image needs to be a box; harmless when done again. Answers `UID GID REAPER HOME` of the agent.
#
#   sh -c THIS rollwright AGENT_ID
set -e
umask 022

append() { # FILE LINE
    if [ -s "$1" ] && [ "$(tail -c 1 "$1")" ]; then echo >>"$1"; fi
    echo "$2" >>"$1"
}

mkdir -p /tmp /var/tmp /home /root /run/rollwright
chmod 1777 /tmp /var/tmp
chmod 700 /run/rollwright
grep -qs '^root:' /etc/passwd || append /etc/passwd 'root:x:0:0:root:/root:/bin/sh'
grep -qs '^root:' /etc/group || append /etc/group 'root:x:0:'
if ! grep -q '^agent:' /etc/passwd; then
    grep -q '^agent:' /etc/group || append /etc/group "agent:x:$1:"
    append /etc/passwd "agent:x:$1:$1::/home/agent:/bin/sh"
fi
while IFS=: read -r name _ uid gid _ home _; do
    [ "$name" != agent ] || break
done </etc/passwd
if [ ! -d "$home" ]; then
    mkdir -p "$home"
    chown "$uid:$gid" "$home"
fi
grep -qsF 'directory = *' /etc/gitconfig || printf '[safe]\n\tdirectory = *\n' >>/etc/gitconfig
reaper=-
for file in /sbin/docker-init /run/podman-init /dev/init; do
    if [ -x "$file" ] && "$file" -s -- sh -c : >/dev/null 2>&1; then
        reaper=$file
        break
    fi
done
echo "$uid $gid $reaper $home"
