# Takes, captures and applies patches with a git directory of our own (the shadow), which the agent can neither read
# nor write. Run by root: sh patch.sh {baseline|capture|apply} WORKDIR SHADOW NONCE [...]. Results are `key value` lines.
#
# Files are found by git's own walk and stored by plumbing, so the agent's repository (its index, config, attributes,
# hooks, ignore rules) has no say. Indexes in SHADOW: `base` = the tree before the agent; `seen` = that plus
# placeholders for files that were there but ignored, so that they do not look new later.
set -eu
umask 077
export LC_ALL=C
export PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH"
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE \
      GIT_EXTERNAL_DIFF GIT_DIFF_OPTS GIT_CONFIG_PARAMETERS GIT_CONFIG_COUNT GIT_CONFIG GIT_ATTR_SOURCE GIT_PREFIX
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_DEFAULT_HASH=sha1 GIT_OPTIONAL_LOCKS=0

step=$1 workdir=$2 shadow=$3 nonce=$4
empty_blob=e69de29bb2d1d6434b8b29ae775ad8c2e48c5391
max_objects_kib=262144

export HOME="$shadow" XDG_CONFIG_HOME="$shadow"
command -v git >/dev/null || { echo "git is not in the image" >&2; exit 1; }

shadow_git() { # shadow_git INDEX ARGS...
    index=$1; shift
    GIT_DIR="$shadow/git" GIT_WORK_TREE="$workdir" GIT_INDEX_FILE="$shadow/$index" git "$@"
}

measure() { # measure LIST: sets $files and $bytes
    set -- $(xargs -0 -r stat -c %s -- <"$1" | awk '{ n++; total += $1 } END { printf "%.0f %.0f\n", n, total }')
    files=$1 bytes=$2
}

placeholders() { # placeholders INDEX LIST
    [ -s "$2" ] || return 0
    xargs -0 -r printf "100644 $empty_blob 0\t%s\0" <"$2" >"$shadow/entries"
    shadow_git "$1" update-index -z --index-info <"$shadow/entries"
}

# git does not look inside a nested repository, so its .git gets out of the way while we look.
nested_aside() {
    trap nested_back EXIT
    find . -path ./.git -prune -o -name .git -prune -exec sh -c '
        : >"$1"; nonce=$2; shift 2
        for p; do mv "$p" "$p.$nonce" || failed=1; done
        [ -z "${failed-}" ]' _ "$shadow/nested" "$nonce" {} + 2>"$shadow/aside.err" ||
        { [ -s "$shadow/aside.err" ] && beyond_reach "$shadow/aside.err"; } || exit 1
}

# Paths can be made that are too long for any program to name. Nothing can test what lies there, and nothing can capture it.
unreachable=
beyond_reach() { # beyond_reach ERRORS: says what they were, or only notes that they are of this kind
    [ -s "$1" ] || return 0
    # git cuts its message before it comes to the reason.
    if [ "$step" = capture ] && awk 'length < 3500 && !/File name too long/ { other = 1 } END { exit other }' "$1"; then
        unreachable=1
        return 0
    fi
    cat "$1" >&2
    return 1
}
nested_back() {
    [ -e "$shadow/nested" ] || return 0
    find . -path ./.git -prune -o -name ".git.$nonce" -prune -exec sh -c 'for p; do mv "$p" "${p%".$0"}"; done' "$nonce" {} +
    rm -f "$shadow/nested"
}

add() { # add INDEX LIST: store the files; whatever git has to say about one (it will not name .GIT) goes to add.err
    [ -s "$2" ] || return 0
    shadow_git "$1" update-index --add -z --stdin <"$2" 2>>"$shadow/add.err" || { cat "$shadow/add.err" >&2; exit 1; }
}

baseline() {
    mkdir -p "$(dirname "$shadow")"
    mkdir "$shadow"
    git init -q --bare --template= "$shadow/git"
    mkdir -p "$shadow/git/info"
    cat >"$shadow/git/config" <<'END'
[core]
	repositoryFormatVersion = 0
	bare = false
	fileMode = true
	symlinks = true
	ignoreCase = false
	precomposeUnicode = false
	protectNTFS = false
	protectHFS = false
	autocrlf = false
	safecrlf = false
	attributesFile = /dev/null
	excludesFile = /dev/null
	hooksPath = /dev/null
	fsmonitor = false
	untrackedCache = false
	splitIndex = false
	trustctime = true
	checkStat = default
	quotePath = true
	looseCompression = 1
	fsync = none
[gc]
	auto = 0
END
    echo '* -text -filter -ident -merge !diff !eol !working-tree-encoding' >"$shadow/git/info/attributes"
    cat >"$shadow/caches" <<END
__pycache__/
*.pyc
*.pyo
.pytest_cache/
.mypy_cache/
.ruff_cache/
.hypothesis/
.tox/
.nox/
.venv/
node_modules/
.DS_Store
.git.$nonce
END
    printf '[safe]\n\tdirectory = *\n' >"$shadow/.gitconfig"
    if env -u GIT_CONFIG_GLOBAL git ls-tree -r -z HEAD >"$shadow/head" 2>/dev/null; then
        # What the folder's own repository holds need not be compressed again, file by file.
        objects=$(env -u GIT_CONFIG_GLOBAL git rev-parse --git-path objects)
        if [ "$(du -sk "$objects" | cut -f1)" -le "$max_objects_kib" ]; then cp -R "$objects/." "$shadow/git/objects/"; fi
        exclude=$(env -u GIT_CONFIG_GLOBAL git rev-parse --git-path info/exclude)
        if [ -f "$exclude" ]; then cp "$exclude" "$shadow/git/info/exclude"; fi
    else
        : >"$shadow/head"
    fi
    nested_aside
    : >"$shadow/add.err"
    # Tracked by the image's commit although its ignore rules match.
    shadow_git head.index update-index -z --index-info <"$shadow/head"
    shadow_git head.index ls-files -c -i --exclude-standard -X "$shadow/caches" -z >"$shadow/candidates"
    [ ! -s "$shadow/candidates" ] || xargs -0 -r sh -c 'for p; do if [ -L "$p" ] || [ -f "$p" ]; then printf "%s\0" "$p"; fi; done' _ \
        <"$shadow/candidates" >"$shadow/list"
    [ ! -s "$shadow/candidates" ] || add base "$shadow/list"
    shadow_git base ls-files -o --exclude-standard -X "$shadow/caches" -z >"$shadow/list"
    add base "$shadow/list"
    mv "$shadow/add.err" "$shadow/unstorable"
    cp "$shadow/base" "$shadow/seen"
    shadow_git base ls-files -o -i --exclude-standard -z >"$shadow/list"
    placeholders seen "$shadow/list"
    echo "base_tree $(shadow_git base write-tree)"
}

# Leaves the working tree's present state in the index `now`.
scan() { # scan MAX_BYTES MAX_FILES IGNORED_BYTES IGNORED_FILES MAX_ENTRIES
    if [ "$step" = capture ]; then # before anything that would walk millions of folders, one by one
        entries=$(find . -path ./.git -prune -o -print0 | tr -dc '\000' | head -c $(($5 + 1)) | wc -c)
        if [ "$entries" -gt "$5" ]; then
            echo "over entries>$5"
            exit 0
        fi
    fi
    left_out=0
    : >"$shadow/add.err"
    cp "$shadow/base" "$shadow/now"
    cp "$shadow/seen" "$shadow/seen.now"
    cp "$shadow/base" "$shadow/probe"
    touch -t 197001020000 "$shadow/probe" # an index this old makes git compare contents instead of believing times
    nested_aside
    shadow_git probe diff-files --name-only --no-ext-diff -z >"$shadow/changed"
    if [ -s "$shadow/changed" ]; then
        shadow_git now update-index --force-remove -z --stdin <"$shadow/changed"
        shadow_git seen.now update-index --force-remove -z --stdin <"$shadow/changed"
    fi
    shadow_git seen.now ls-files -o -X "$shadow/caches" -z >"$shadow/list" 2>"$shadow/walk.err"
    beyond_reach "$shadow/walk.err" || :
    measure "$shadow/list"
    if [ "$files" -gt "$4" ] || [ "$bytes" -gt "$3" ]; then
        # Too much for a hand-made change: build products are left out if the tree's own rules ignore them.
        all_files=$files all_bytes=$bytes
        shadow_git seen ls-files -o -i --exclude-standard -z >"$shadow/ignored"
        placeholders seen.now "$shadow/ignored"
        shadow_git seen.now ls-files -o -X "$shadow/caches" -z >"$shadow/kept"
        measure "$shadow/kept"
        if [ $((all_files - files)) -gt "$4" ] || [ $((all_bytes - bytes)) -gt "$3" ]; then
            left_out=$((all_files - files))
            mv "$shadow/kept" "$shadow/list"
        else
            files=$all_files bytes=$all_bytes
        fi
    fi
    if [ "$files" -gt "$2" ] || [ "$bytes" -gt "$1" ]; then
        echo "over files=$files,bytes=$bytes"
        exit 0
    fi
    add now "$shadow/list"
    tree=$(shadow_git now write-tree)
    echo "tree $tree"
    if ! cmp -s "$shadow/add.err" "$shadow/unstorable"; then
        echo "refused $(head -n 1 "$shadow/add.err" | head -c 300 | tr -cd '[:print:]')"
    elif [ "$unreachable" ]; then
        echo "refused a path too long to be named"
    fi
    if [ "$left_out" -gt 0 ]; then echo "left_out $left_out"; fi
}

capture() { # capture BASE_TREE MAX_PATCH_BYTES SCAN_LIMITS...
    base_tree=$1 max=$2; shift 2
    scan "$@"
    { shadow_git now diff-tree -p --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color -U3 \
        --src-prefix=a/ --dst-prefix=b/ "$base_tree" "$tree" && echo ok >"$shadow/diffed"; } |
        head -c $((max + 1)) >"$shadow/patch"
    bytes=$(wc -c <"$shadow/patch" | tr -d ' ')
    if [ "$bytes" -gt "$max" ]; then echo "over patch>$max"; exit 0; fi
    [ -f "$shadow/diffed" ] || { echo "git diff-tree failed" >&2; exit 1; }
    rm -f "$shadow/diffed"
    echo "bytes $bytes"
    echo "sha256 $(sha256sum <"$shadow/patch" | cut -d' ' -f1)"
}

apply() { # apply SCAN_LIMITS...
    nested_aside
    if ! shadow_git base apply --binary --whitespace=nowarn "$shadow/patch" 2>"$shadow/apply.err"; then
        echo "failed $(head -c 2000 "$shadow/apply.err" | tr '\n' ';' | tr -cd '[:print:]')"
        exit 0
    fi
    scan "$@"
}

cd "$workdir"
shift 4
"$step" "$@" </dev/null
