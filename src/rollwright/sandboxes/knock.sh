# One GET of $1 with the bearer token $2, by whatever this image has. Prints the status line's code.
# Exit 3: the image has nothing that can make the request; 4: nobody answers.
url=$1 key=$2
has() { command -v "$1" >/dev/null 2>&1; }

if has python3; then
    exec python3 -c '
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]})
try:
    print(urllib.request.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    sys.stderr.write(str(error)); sys.exit(4)
' "$url" "$key"
elif has curl; then
    curl -s -o /dev/null -m 10 -w '%{http_code}\n' -H "Authorization: Bearer $key" "$url" || exit 4
elif has wget; then
    wget -q -T 10 -O /dev/null --header "Authorization: Bearer $key" "$url" && echo 200 || exit 4
elif has bash; then
    exec bash -c '
place=${1#http://} path=/${1#http://*/}
place=${place%%/*}
exec 9<>"/dev/tcp/${place%:*}/${place##*:}" || exit 4
printf "GET %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n" "$path" "$place" "$2" >&9
read -r -t 10 _ code _ <&9 || exit 4
echo "$code"' knock "$url" "$key"
else
    exit 3
fi
