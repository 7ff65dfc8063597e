// Posts a body to a URL so many times side by side with Go's own client, as it is without any setting, again after each pause, and prints what comes back.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

func ask(answers chan<- string) {
	answer, err := http.Post(os.Args[1], "application/json", strings.NewReader(os.Args[2]))
	if err != nil {
		panic(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		panic(err)
	}
	answers <- string(body)
}

func main() {
	count, _ := strconv.Atoi(os.Args[3])
	for _, pause := range append(os.Args[4:], "0") {
		answers := make(chan string)
		for i := 0; i < count; i++ {
			go ask(answers)
		}
		for i := 0; i < count; i++ {
			fmt.Println(<-answers + "---")
		}
		seconds, _ := strconv.Atoi(pause)
		time.Sleep(time.Duration(seconds) * time.Second)
	}
}
