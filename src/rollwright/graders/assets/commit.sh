# Commits the applied patch, for collect hooks that read commits. Run by root in the workdir: sh commit.sh
set -eu
git rev-parse --verify -q HEAD >/dev/null 2>&1 || exit 0
git add -A
git -c core.hooksPath=/dev/null -c commit.gpgSign=false -c user.name=agent -c user.email=agent@localhost \
    commit -q --allow-empty --no-verify -m solution
