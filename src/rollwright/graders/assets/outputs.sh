# Makes the places that the tests write to by themselves. Run by root: sh outputs.sh FOLDER... -- FILE...
# Folders are made anew and given to the tests; files, whatever is there, are removed.
set -eu
owner=agent
probe=$(mktemp)
chown agent "$probe" 2>/dev/null || owner=root # a box with one user only
rm -f "$probe"
while [ "$1" != -- ]; do
    rm -rf -- "$1"
    mkdir -p -- "$1"
    chown "$owner" -- "$1"
    chmod 755 -- "$1"
    shift
done
shift
for file; do rm -rf -- "$file"; done
