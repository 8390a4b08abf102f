# Makes a task's base from the image's files. Run by root: sh base.sh agent|grader WORKDIR PATCH|- HIDDEN_PATH...
set -eu
export LC_ALL=C
export PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH"
who=$1 workdir=$2 patch=$3
shift 3
hidden=/var/rollwright-hidden

quiet_git() { git -c core.hooksPath=/dev/null -c core.autocrlf=false -c core.fsmonitor=false "$@"; }

# HEAD follows the files, because the agent is given HEAD's tree as its history.
commit() {
    quiet_git rev-parse --verify -q HEAD >/dev/null || return 0
    export GIT_AUTHOR_NAME=base GIT_AUTHOR_EMAIL=base@localhost GIT_COMMITTER_NAME=base GIT_COMMITTER_EMAIL=base@localhost
    new=$(quiet_git commit-tree "$(quiet_git write-tree)" -p HEAD -m base)
    quiet_git update-ref HEAD "$new"
}

cd "$workdir"
if [ "$patch" != - ]; then
    code=0
    quiet_git update-index -q --refresh >/dev/null || :
    quiet_git apply --index --whitespace=nowarn "$patch" || code=$?
    rm -f "$patch"
    if [ "$code" != 0 ]; then echo "the row's patch does not apply to the image's files" >&2; exit 3; fi
    commit
fi
index=0
for path; do
    if [ ! -e "$path" ] && [ ! -L "$path" ]; then echo "the image has no $path" >&2; exit 4; fi
    if [ "$who" = grader ]; then
        index=$((index + 1))
        mkdir -p "$hidden/$index"
        chmod 700 "$hidden"
        printf %s "$path" >"$hidden/$index/path"
        mv -- "$path" "$hidden/$index/content"
        continue
    fi
    case $path in
    "$workdir"/*) quiet_git rm -rq --cached --ignore-unmatch -- "$path" ;;
    esac
    rm -rf -- "$path"
done
if [ "$who" = agent ] && [ $# -gt 0 ]; then commit; fi
# What git wrote is root's; in a box with one user nothing can be given away.
probe=$(mktemp)
if chown agent "$probe" 2>/dev/null; then
    find . -path ./.git -prune -o ! -user agent -exec chown -h agent:agent {} +
fi
rm -f "$probe"
