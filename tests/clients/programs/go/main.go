// What the tests run in Go: the vectors, or one call of Once. See programs.py.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"semel.example/semel"
)

func main() {
	if os.Args[1] == "vectors" {
		vectors(os.Args[2], os.Args[3])
	} else {
		once(os.Args[2])
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func say(fields map[string]any) {
	text, err := json.Marshal(fields)
	check(err)
	fmt.Println(string(text))
}

// --- the vectors ------------------------------------------------------------------------------

type step struct {
	Verb   string
	Send   any
	Text   *string
	Begin  string
	End    string
	Save   map[string]string
	Expect struct {
		Status     int
		Body       map[string]any
		Absent     []string
		RetryAfter bool `json:"retry_after"`
	}
}

type answer struct {
	status     int
	retryAfter time.Duration
	body       map[string]any
}

func vectors(url, file string) {
	text, err := os.ReadFile(file)
	check(err)
	var vectors struct {
		Scenarios []struct {
			Name  string
			Steps []step
		}
	}
	check(json.Unmarshal(text, &vectors))
	client := semel.New(url)
	for _, scenario := range vectors.Scenarios {
		known := map[string]string{"key": "k-" + semel.NewOwner(), "other": "o-" + semel.NewOwner()}
		begun := map[string]chan answer{}
		var wrong any
		for at, step := range scenario.Steps {
			asked := begun[step.End]
			if asked == nil {
				asked = make(chan answer, 1)
				body := bodyOf(step, known)
				go func(verb string) { asked <- ask(client, verb, body) }(step.Verb)
			}
			if step.Begin != "" {
				begun[step.Begin] = asked
				continue
			}
			found := <-asked
			if problem := difference(found, step); problem != "" {
				wrong = fmt.Sprintf("step %d: %s; the answer: %d %v", at+1, problem, found.status, found.body)
				break
			}
			for field, name := range step.Save {
				known[name] = found.body[field].(string)
			}
		}
		say(map[string]any{"name": scenario.Name, "wrong": wrong})
	}
}

func bodyOf(step step, known map[string]string) []byte {
	if step.Text == nil {
		text, err := json.Marshal(filled(step.Send, known))
		check(err)
		return text
	}
	text := *step.Text
	for name, value := range known {
		text = strings.ReplaceAll(text, "$"+name, value)
	}
	return []byte(text)
}

func ask(client *semel.Client, verb string, body []byte) answer {
	if !json.Valid(body) { // which the client does not send
		response, err := http.Post(client.URL+"/v1/"+verb, "application/json", strings.NewReader(string(body)))
		check(err)
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		check(err)
		return answer{status: response.StatusCode, body: read(text)}
	}
	var text json.RawMessage
	err := client.Call(context.Background(), verb, json.RawMessage(body), &text)
	var failed *semel.Error
	if errors.As(err, &failed) {
		return answer{failed.Status, failed.RetryAfter, read(failed.Problem)}
	}
	check(err)
	return answer{status: 200, body: read(text)}
}

func read(text []byte) map[string]any {
	var body map[string]any
	check(json.Unmarshal(text, &body))
	return body
}

func filled(value any, known map[string]string) any {
	switch value := value.(type) {
	case string:
		if found, ok := known[strings.TrimPrefix(value, "$")]; ok && strings.HasPrefix(value, "$") {
			return found
		}
	case []any:
		for at := range value {
			value[at] = filled(value[at], known)
		}
	case map[string]any:
		for name := range value {
			value[name] = filled(value[name], known)
		}
	}
	return value
}

func difference(found answer, step step) string {
	if found.status != step.Expect.Status {
		return fmt.Sprintf("the status is not %d", step.Expect.Status)
	}
	if step.Expect.RetryAfter && found.retryAfter < time.Second {
		return "Retry-After is " + strconv.FormatFloat(found.retryAfter.Seconds(), 'g', -1, 64)
	}
	for field, value := range step.Expect.Body {
		if other, ok := found.body[field]; !ok || !same(other, value) {
			return fmt.Sprintf("%s is not %v", field, value)
		}
	}
	for _, field := range step.Expect.Absent {
		if _, ok := found.body[field]; ok {
			return field + " is there"
		}
	}
	return ""
}

var hex24 = regexp.MustCompile("^[0-9a-f]{24}$")

func same(found, expected any) bool {
	text, isText := found.(string)
	_, isNumber := found.(float64)
	switch expected {
	case "$number":
		return isNumber
	case "$text":
		return isText && text != ""
	case "$hex24":
		return isText && hex24.MatchString(text)
	}
	list, isList := expected.([]any)
	others, areList := found.([]any)
	if !isList || !areList {
		return reflect.DeepEqual(found, expected)
	}
	for at := range list {
		if at >= len(others) || !same(others[at], list[at]) {
			return false
		}
	}
	return len(list) == len(others)
}

// --- one call ---------------------------------------------------------------------------------

type CardDeclined struct{}

func (CardDeclined) Error() string { return "insufficient funds" }

func once(text string) {
	var told struct {
		URL, Scope, Key, Folder, Work string
		Result                        json.RawMessage
		GivesUp                       float64 `json:"gives_up"`
		Options                       struct {
			Token    string
			Patience float64
		}
		Call struct {
			Payload     json.RawMessage
			Wait, Lease *float64
			Outcome     string
			Response    bool
		}
	}
	check(json.Unmarshal([]byte(text), &told))
	client := semel.New(told.URL)
	client.Token = told.Options.Token
	if told.Options.Patience != 0 {
		client.Patience = seconds(told.Options.Patience)
	}
	options := &semel.Options{}
	if told.Call.Payload != nil {
		options.Payload = told.Call.Payload
	}
	if told.Call.Wait != nil {
		options.Wait = seconds(*told.Call.Wait)
		if options.Wait == 0 {
			options.Wait = -1
		}
	}
	if told.Call.Lease != nil {
		options.Lease = seconds(*told.Call.Lease)
	}
	if told.Call.Outcome != "" {
		options.Outcome = func(error) string { return told.Call.Outcome }
	}
	lost := any(false)
	work := func(ctx context.Context, attempt *semel.Attempt) (json.RawMessage, error) {
		effects, err := os.OpenFile(told.Folder+"/effects", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		check(err)
		_, err = fmt.Fprintf(effects, "%d %v\n", attempt.Number, attempt.Takeover)
		check(err)
		check(effects.Close())
		switch told.Work {
		case "gate":
			for os.IsNotExist(stat(told.Folder + "/gate")) {
				time.Sleep(10 * time.Millisecond)
			}
		case "until lost":
			<-ctx.Done()
			if attempt.Lost() {
				lost = "lease_lost"
			}
		case "too large":
			return json.RawMessage(`"` + strings.Repeat("x", 4_300_000) + `"`), nil
		case "no JSON":
			return json.RawMessage("{"), nil
		case "raise oddly":
			panic("a text")
		case "raise":
			return nil, CardDeclined{}
		}
		return told.Result, nil
	}
	ctx := context.Background()
	if told.GivesUp != 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, seconds(told.GivesUp))
		defer cancel()
	}
	defer func() {
		if panicked := recover(); panicked != nil {
			say(map[string]any{"error": panicked, "lost": lost})
		}
	}()
	var result any
	var err error
	if told.Call.Response {
		result, err = semel.Once(ctx, client, told.Scope, told.Key, options,
			func(ctx context.Context, attempt *semel.Attempt) (response semel.Response, err error) {
				result, err := work(ctx, attempt)
				check(json.Unmarshal(result, &response))
				return response, err
			})
	} else {
		result, err = semel.Once(ctx, client, told.Scope, told.Key, options, work)
	}
	var failed *semel.Error
	switch {
	case err == nil:
		say(map[string]any{"result": result, "lost": lost})
	case errors.As(err, &failed):
		problem, kept := json.RawMessage("null"), failed.Result
		if told.Work == "no JSON" {
			kept = nil
		}
		if json.Valid(failed.Problem) {
			problem = failed.Problem
		}
		say(map[string]any{"error": failed.Code, "status": failed.Status, "message": failed.Detail,
			"problem": problem, "kept": kept, "lost": lost})
	default:
		say(map[string]any{"error": reflect.TypeOf(err).Name(), "message": err.Error(), "lost": lost})
	}
}

func stat(path string) error {
	_, err := os.Stat(path)
	return err
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
