# Runs the tests of a swebench_pro task: bash pro_launch.sh FOLDER SELECTED. FOLDER has env.sh and run_script.sh.
. "$1/env.sh"
exec bash "$1/run_script.sh" "$2"
