# Makes a box's working folder ready. Run by root: sh workspace.sh prepare WORKDIR [PRE_COMMANDS_FILE] | scrub WORKDIR.
set -eu
export LC_ALL=C

step=$1 workdir=$2
pre=${3-}

need_git() { command -v git >/dev/null || { echo "git is not in the image" >&2; exit 1; }; }

# In a box with one user only, root and agent are the same and nothing can be given away.
two_users() {
    probe=$(mktemp)
    if chown agent "$probe" 2>/dev/null; then rm -f "$probe"; else rm -f "$probe"; return 1; fi
}

prepare() {
    need_git
    git config --system --add safe.directory '*'
    if [ -n "$pre" ]; then
        shell=sh
        if command -v bash >/dev/null; then shell=bash; fi
        code=0
        "$shell" -e "$pre" </dev/null || code=$?
        rm -f "$pre"
        if [ "$code" != 0 ]; then echo "pre_commands ended with exit code $code" >&2; exit 3; fi
        cd "$workdir"
    fi
    # The repository is left out: a full history is much to copy up, and the agent gets a new one anyway.
    if two_users; then find "$workdir" -path "$workdir/.git" -prune -o ! -user agent -exec chown -h agent:agent {} +; fi
}

commit_env() {
    export GIT_AUTHOR_NAME=rollwright GIT_AUTHOR_EMAIL=rollwright@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00Z'
    export GIT_COMMITTER_NAME=rollwright GIT_COMMITTER_EMAIL=rollwright@localhost GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
    unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
}

settle() { # settle CONFIG: lets the agent commit and keeps git from starting background work
    printf '[core]\n\tbare = false\n[user]\n\tname = agent\n\temail = agent@localhost\n[gc]\n\tauto = 0\n' >>"$1"
}

fresh_repository() {
    git init -q --template= .
    git symbolic-ref HEAD refs/heads/main
    settle .git/config
    git -c advice.addEmbeddedRepo=false -c core.safecrlf=false add -A --ignore-errors || :
    git -c core.hooksPath=/dev/null -c commit.gpgSign=false commit -q --allow-empty --no-verify -m base
    rm -rf .git/logs
}

# A new repository with the objects of HEAD's tree and one parentless commit takes the old one's place.
single_commit() {
    tree=$(git rev-parse --verify -q 'HEAD^{tree}')
    store=$(cd "$(git rev-parse --git-common-dir)" && pwd -P)
    exclude=$(git rev-parse --git-path info/exclude)
    commit=$(git commit-tree "$tree" -m base)
    new=$(mktemp -d "$PWD/.git.XXXXXX")
    git init -q --bare --template= "$new"
    mkdir -p "$new/objects/pack"
    echo "$commit" | git -c pack.compression=1 pack-objects --revs --window=0 -q "$new/objects/pack/pack" >/dev/null
    git --git-dir="$new" update-ref refs/heads/main "$commit"
    git --git-dir="$new" symbolic-ref HEAD refs/heads/main
    settle "$new/config"
    mkdir -p "$new/info"
    if [ -f "$exclude" ]; then cp "$exclude" "$new/info/exclude"; fi
    if [ "$store" = "$PWD/.git" ]; then
        rm -rf .git
    else
        rm -f .git
        chown root "$store" && chmod 700 "$store"
    fi
    chmod 755 "$new"
    mv "$new" .git
    # Submodules kept their history inside the old repository.
    find . -path ./.git -prune -o -name .git -type f -exec sh -c 'for f; do if grep -q "/modules/" "$f"; then rm -f "$f"; fi; done' _ {} +
    git read-tree HEAD
    git update-index -q --refresh || :
}

verify() {
    commits=$(git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c -E '^(commit|tag)$' || :)
    refs=$(git for-each-ref | wc -l | tr -d ' ')
    if [ "$commits" != 1 ] || [ "$refs" != 1 ] || [ -n "$(git remote)" ] || [ -e .git/logs ] ||
        [ -e .git/objects/info/alternates ] || [ -e .git/packed-refs ]; then
        echo "history is still visible: $commits commits, $refs refs" >&2
        exit 4
    fi
    echo "commit $(git rev-parse HEAD)"
}

scrub() {
    need_git
    commit_env
    if top=$(git rev-parse --show-toplevel 2>/dev/null); then
        cd "$top"
        if git rev-parse --verify -q HEAD >/dev/null; then
            single_commit
        else
            rm -rf .git
            fresh_repository
        fi
    else
        fresh_repository
    fi
    verify
    if two_users; then find .git ! -user agent -exec chown -h agent:agent {} +; fi
}

[ -d "$workdir" ] || { echo "the image has no folder $workdir" >&2; exit 2; }
cd "$workdir"
"$step" </dev/null
