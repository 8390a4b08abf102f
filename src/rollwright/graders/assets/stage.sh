# Makes the grading box ready for the tests, after the patch. Run by root: sh stage.sh WORKDIR SHADOW REPORT...
# SHADOW/restore and SHADOW/remove (NUL lists) are protected paths to put back; SHADOW/test.patch is the tests' own patch.
set -eu
export LC_ALL=C
export PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH"
workdir=$1 shadow=$2
shift 2

shadow_git() {
    GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME="$shadow" \
        GIT_DIR="$shadow/git" GIT_WORK_TREE="$workdir" GIT_INDEX_FILE="$shadow/base" git "$@"
}

cd "$workdir"
if [ -f "$shadow/remove" ]; then
    xargs -0 -r sh -c 'for p; do rm -f -- "$p" 2>/dev/null || :; rmdir -p -- "$(dirname -- "$p")" 2>/dev/null || :; done' _ \
        <"$shadow/remove"
fi
if [ -f "$shadow/restore" ]; then
    shadow_git checkout-index -f -z --stdin <"$shadow/restore"
fi
# What base.sh took away comes back, whatever the patch has put in its place.
hidden=/var/rollwright-hidden
if [ -d "$hidden" ]; then
    for entry in "$hidden"/*; do
        path=$(cat "$entry/path" && echo x)
        path=${path%x}
        rm -rf -- "$path"
        mkdir -p -- "$(dirname -- "$path")"
        mv -- "$entry/content" "$path"
    done
    rm -rf "$hidden"
fi
if [ -f "$shadow/test.patch" ]; then
    if ! shadow_git apply --binary --whitespace=nowarn "$shadow/test.patch" 2>"$shadow/apply.err"; then
        echo "failed $(head -c 2000 "$shadow/apply.err" | tr '\n' ';' | tr -cd '[:print:]')"
        exit 0
    fi
fi
owner=agent
probe=$(mktemp)
chown agent "$probe" 2>/dev/null || owner=root # a box with one user only
rm -f "$probe"
find . -path ./.git -prune -o ! -user "$owner" -exec chown -h "$owner" {} +
# The tests may write their report and nothing else beside it.
for report; do
    mkdir -p "$(dirname "$report")"
    chown root "$(dirname "$report")"
    chmod 755 "$(dirname "$report")"
    : >"$report"
    chown "$owner" "$report"
    chmod 600 "$report"
done
