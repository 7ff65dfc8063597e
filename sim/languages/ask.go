// Posts a body to a URL with Go's own client, as it is without any setting, and prints what comes back.
package main

import (
	"io"
	"net/http"
	"os"
	"strings"
)

func main() {
	answer, err := http.Post(os.Args[1], "application/json", strings.NewReader(os.Args[2]))
	if err != nil {
		panic(err)
	}
	defer answer.Body.Close()
	if _, err := io.Copy(os.Stdout, answer.Body); err != nil {
		panic(err)
	}
}
