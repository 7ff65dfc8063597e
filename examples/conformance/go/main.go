// Runs the cases of a folder against a pipeline: the runner for Go. ../README.md says what a runner does.
//
//	(Go 1.26 or newer)
//	KAFKA=localhost:9092 PIPELINE=demo GATEWAY=http://localhost:8000 MODEL=demo go run . ../cases/*.json
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	timeout = 120 * time.Second
	missing = "nothing came"
)

var kafka, pipeline, gateway, model = os.Getenv("KAFKA"), os.Getenv("PIPELINE"), os.Getenv("GATEWAY"), os.Getenv("MODEL")

type produced struct {
	Class         string            `json:"class"`
	Key           json.RawMessage   `json:"key"`
	Headers       map[string]string `json:"headers"`
	HeadersBase64 map[string][]byte `json:"headers_base64"` // encoding/json reads base64 into bytes
	PrefixBase64  []byte            `json:"prefix_base64"`
	Value         json.RawMessage   `json:"value"`
	Text          string            `json:"text"`
	Times         int               `json:"times"`
}

func (p *produced) bytes() []byte {
	if p.Text != "" {
		return append(p.PrefixBase64, p.Text...)
	}
	return append(p.PrefixBase64, p.Value...)
}

type posted struct {
	Path       string          `json:"path"`
	Body       json.RawMessage `json:"body"`
	LeaveAfter int             `json:"leave_after"`
}

type testCase struct {
	Produce *produced `json:"produce"`
	Post    *posted   `json:"post"`
	Expect  struct {
		Result     map[string]any    `json:"result"`
		DeadLetter map[string]string `json:"dead_letter"`
	} `json:"expect"`

	name, id, text string
	failed         error
}

// loadCase returns a case with its names filled in.
func loadCase(path string) (*testCase, error) {
	made := &testCase{name: strings.TrimSuffix(filepath.Base(path), ".json"), id: "go-" + uuid.NewString()}
	read, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	names := strings.NewReplacer("{id}", made.id, "{pipeline}", pipeline, "{model}", model)
	return made, json.Unmarshal([]byte(names.Replace(string(read))), made)
}

// produceMessages produces a case's message, as often as it says, and returns once Kafka has acknowledged it.
func produceMessages(client *kgo.Client, one *testCase) error {
	told := one.Produce
	for range max(told.Times, 1) {
		record := &kgo.Record{Topic: "penstock." + pipeline + ".requests." + told.Class, Value: told.bytes()}
		if len(told.Key) == 0 { // null is four bytes
			record.Key = []byte(one.id)
		}
		for name, text := range told.Headers {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: name, Value: []byte(text)})
		}
		for name, value := range told.HeadersBase64 {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: name, Value: value})
		}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		if err := client.ProduceSync(ctx, record).FirstErr(); err != nil {
			return err
		}
	}
	return nil
}

// followStream posts a request and follows its stream to the end, over two connections if the case says so.
func followStream(one *testCase) error {
	asked, err := http.NewRequest("POST", gateway+one.Post.Path, bytes.NewReader(one.Post.Body))
	if err != nil {
		return err
	}
	asked.Header.Set("Content-Type", "application/json")
	var lastID string
	seen := map[string]bool{}
	for _, most := range []int{one.Post.LeaveAfter, 0} {
		done, err := followConnection(asked, most, one, seen, &lastID)
		if done || err != nil {
			return err
		}
		if asked, err = http.NewRequest("GET", gateway+"/v1/streams/"+one.id, nil); err != nil {
			return err
		}
		asked.Header.Set("Last-Event-ID", lastID)
	}
	return errors.New("the stream has no end")
}

// followConnection reads events until the end, or until it has read as many as it may (0: all).
func followConnection(asked *http.Request, most int, one *testCase, seen map[string]bool, lastID *string) (bool, error) {
	answer, err := http.DefaultClient.Do(asked)
	if err != nil {
		return false, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != 200 {
		return false, errors.New(answer.Status)
	}
	count, lines := 0, bufio.NewScanner(answer.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		switch {
		case name == "id" && seen[value]:
			return false, fmt.Errorf("the event %s came twice", value)
		case name == "id":
			seen[value], *lastID = true, value
		case name == "data" && value == "[DONE]":
			return true, nil
		case name == "data":
			var event struct {
				ID      string `json:"id"`
				Choices []struct {
					Text string `json:"text"`
				} `json:"choices"`
			}
			if err := json.Unmarshal([]byte(value), &event); err != nil {
				return false, err
			}
			one.id = event.ID
			for _, choice := range event.Choices {
				one.text += choice.Text
			}
		case lines.Text() == "":
			if count++; count == most {
				return false, nil
			}
		}
	}
	return false, lines.Err()
}

// holds returns whether all that is expected is in what was found.
func holds(expected, found any) bool {
	wanted, isObject := expected.(map[string]any)
	if !isObject {
		return reflect.DeepEqual(expected, found)
	}
	has, _ := found.(map[string]any)
	for name, value := range wanted {
		if !holds(value, has[name]) {
			return false
		}
	}
	return true
}

// findProblem returns why a case does not hold, or an empty string.
func findProblem(one *testCase, results map[string][]map[string]any, letters []*kgo.Record) string {
	if one.Expect.DeadLetter != nil {
		var found []*kgo.Record
		for _, letter := range letters {
			if bytes.Equal(letter.Value, one.Produce.bytes()) {
				found = append(found, letter)
			}
		}
		switch {
		case len(found) == 0:
			return missing
		case len(found) > 1 || !hasHeaders(found[0], one.Expect.DeadLetter):
			return fmt.Sprintf("%d dead letters, or other headers: %v", len(found), found[0].Headers)
		}
		return ""
	}
	found := results[one.id]
	switch {
	case len(found) == 0:
		return missing
	case len(found) > 1:
		return fmt.Sprintf("%d results", len(found))
	}
	if !holds(one.Expect.Result, found[0]) || (one.Post != nil && found[0]["text"] != one.text) {
		return fmt.Sprintf("another result: %v", found[0])
	}
	return ""
}

// hasHeaders returns whether a record's headers begin as expected.
func hasHeaders(record *kgo.Record, expected map[string]string) bool {
	found := map[string]string{}
	for _, header := range record.Headers {
		found[header.Key] = string(header.Value)
	}
	for name, begins := range expected {
		if !strings.HasPrefix(found[name], begins) {
			return false
		}
	}
	return true
}

func run() (bool, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(kafka, ",")...),
		kgo.ConsumerGroup("conformance-"+uuid.NewString()),
		kgo.ConsumeTopics("penstock."+pipeline+".results", "penstock."+pipeline+".dead"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), // messages of aborted transactions are not results
	)
	if err != nil {
		return false, err
	}
	defer client.Close()
	var cases []*testCase
	for _, path := range os.Args[1:] {
		one, err := loadCase(path)
		if err != nil {
			return false, err
		}
		if one.Produce != nil {
			one.failed = produceMessages(client, one)
		} else {
			one.failed = followStream(one)
		}
		cases = append(cases, one)
	}
	results, letters := map[string][]map[string]any{}, []*kgo.Record{}
	isOpen := func() bool {
		for _, one := range cases {
			if one.failed == nil && findProblem(one, results, letters) == missing {
				return true
			}
		}
		return false
	}
	for until := time.Now().Add(timeout); isOpen() && time.Now().Before(until); {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		client.PollFetches(ctx).EachRecord(func(record *kgo.Record) {
			var result map[string]any
			if strings.HasSuffix(record.Topic, ".dead") {
				letters = append(letters, record)
			} else if json.Unmarshal(record.Value, &result) == nil {
				id := fmt.Sprint(result["id"])
				results[id] = append(results[id], result)
			}
		})
		cancel()
	}
	allHold := true
	for _, one := range cases {
		told := map[string]any{"case": one.name, "ok": true}
		problem := findProblem(one, results, letters)
		if one.failed != nil {
			problem = one.failed.Error()
		}
		if problem != "" {
			told["ok"], told["problem"], allHold = false, problem, false
		}
		line, _ := json.Marshal(told)
		fmt.Println(string(line))
	}
	return allHold, nil
}

func main() {
	allHold, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if !allHold {
		os.Exit(1)
	}
}
