# One GET of http://127.0.0.1:$1$2 with the bearer token $3, by whatever this image has. Prints the status line's code.
# Exit 3: the image has nothing that can make the request; 4: nobody answers.
port=$1 path=$2 key=$3
url="http://127.0.0.1:$port$path"
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
elif has bash; then
    exec bash -c '
exec 9<>"/dev/tcp/127.0.0.1/$1" || exit 4
printf "GET %s HTTP/1.1\r\nHost: box\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n" "$2" "$3" >&9
read -r -t 10 _ code _ <&9 || exit 4
echo "$code"' knock "$port" "$path" "$key"
elif has wget; then
    wget -q -T 10 -O /dev/null --header "Authorization: Bearer $key" "$url" && echo 200 || exit 4
else
    exit 3
fi
