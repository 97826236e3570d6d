// Package semel is the client of the semel service: it runs any operation once per key.
//
//	client := semel.New("http://127.0.0.1:8600")
//	charge, err := semel.Once(ctx, client, "orders.pay", orderID, nil,
//		func(ctx context.Context, attempt *semel.Attempt) (Charge, error) {
//			return bank.Charge(ctx, order)
//		})
//
// It is one file and needs the standard library only, from Go 1.19 on. Copy it into your project; it
// works with any version of the service that has /v1.
//
// Its law: every request may be sent again, because it names its owner. Only your function decides
// whether an attempt failed, so an error of finish is never sent as fail.
package semel

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const longestWait = 25 * time.Second // that one request may wait for another attempt

// Client says where the service is, and how to ask it. Set its fields before you use it.
type Client struct {
	URL      string
	Token    string        // sent as Authorization: Bearer; New takes $SEMEL_TOKEN
	By       string        // who calls, for operators; New takes $SEMEL_NAME, or host and pid
	Timeout  time.Duration // after which a request without an answer is sent again
	Patience time.Duration // for which it is sent again
	HTTP     *http.Client
}

// New returns a client of the service at a URL such as "http://127.0.0.1:8600".
func New(url string) *Client {
	by := os.Getenv("SEMEL_NAME")
	if by == "" {
		host, _ := os.Hostname()
		by = fmt.Sprintf("%.180s:%d", host, os.Getpid())
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 64
	transport.IdleConnTimeout = 60 * time.Second // The service drops them after 75.
	return &Client{
		URL: strings.TrimRight(url, "/"), Token: os.Getenv("SEMEL_TOKEN"), By: by,
		Timeout: 10 * time.Second, Patience: 30 * time.Second,
		HTTP: &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		}},
	}
}

// Options of one call; nil stands for the zero value.
type Options struct {
	// Payload is what must be the same on a retry, as JSON. Write amounts as text or integers. None
	// is compared if it is nil; json.RawMessage("null") is a payload.
	Payload any
	// Fingerprint stands for the payload, instead of it: 32 hex digits.
	Fingerprint string
	// Wait is how long to wait for another attempt of the key: a minute, or not at all if negative.
	Wait time.Duration
	// Lease is how long the key is kept without a renewal; the scope says it otherwise.
	Lease time.Duration
	// Outcome says what an error of the function means: "forget" (the next call runs), "retryable"
	// (so it does, with the same payload), "final" (later calls get this failure), or "unknown". The
	// scope says it otherwise, or if Outcome returns "".
	Outcome func(error) string
}

// Attempt is one run of an operation.
type Attempt struct {
	Scope, Key string
	Number     int   // how many attempts the key has had, this one included
	Fence      int64 // grows with each attempt: other systems reject a late one by it
	Takeover   bool  // the attempt before ended without an outcome
	lost       atomic.Bool
}

// Lost reports whether the lease is lost: another attempt may run. The context is canceled then.
func (a *Attempt) Lost() bool { return a.lost.Load() }

// Response is an HTTP response. If your function returns one, duplicates in every language get it as
// such. Its body is text, or else Base64.
type Response struct {
	Status  int         `json:"status"`
	Headers [][2]string `json:"headers,omitempty"`
	Body    string      `json:"body,omitempty"`
	Base64  string      `json:"base64,omitempty"`
}

// Answer of a start: a run, or the result of one that is done.
type Answer struct {
	Status     string          `json:"status"` // "run" or "done"
	Owner      string          `json:"owner"`
	Attempt    int             `json:"attempt"`
	Fence      json.Number     `json:"fence"`
	Takeover   bool            `json:"takeover"`
	Lease      float64         `json:"lease"` // in seconds, from sending plus Waited
	RenewEvery float64         `json:"renew_every"`
	Waited     float64         `json:"waited"`
	Result     json.RawMessage `json:"result"`
	Lossy      bool            `json:"lossy"` // the result has types that JSON does not have, as text
	Response   json.RawMessage `json:"response"`
}

// Error is an answer that is an error, or none.
type Error struct {
	Code       string        // such as "payload_mismatch"; "unreachable" and "bad_answer" are the client's
	Status     int           // of HTTP; 0 = no answer came
	Detail     string        // what is wrong, in words
	Field      string        // of the request, where one is wrong
	RetryAfter time.Duration // after which a retry may help, where the service says so
	Problem    []byte        // the whole answer
	Result     any           // what your function returned, where only storing it failed
	cause      error
}

func (e *Error) Error() string { return "semel: " + e.Code + ": " + e.Detail }

// Unwrap returns why no answer came.
func (e *Error) Unwrap() error { return e.cause }

// Code returns the code of an error of the service, "" for any other error.
func Code(err error) string {
	var found *Error
	if errors.As(err, &found) {
		return found.Code
	}
	return ""
}

// Once runs work once per scope and key, and returns its result; a duplicate gets the same one.
//
// The context of work is that of the caller; it is canceled if the lease is lost, too. What work
// returns must encode as JSON. Its error reaches the caller, and the outcome is recorded. If its
// result cannot be stored, Once returns it together with an *Error.
func Once[T any](ctx context.Context, client *Client, scope, key string, options *Options,
	work func(context.Context, *Attempt) (T, error)) (T, error) {
	var result T
	if options == nil {
		options = &Options{}
	}
	named := fields{"scope": scope, "key": key, "owner": NewOwner()}
	if options.Lease != 0 {
		named["lease"] = options.Lease.Seconds() // for the start and each renewal
	}
	renewal, _ := json.Marshal(named)
	answer, until, err := client.begin(ctx, named, options)
	delete(named, "lease")
	if err != nil {
		return result, err
	}
	if answer.Status == "done" {
		stored := answer.Result
		if answer.Response != nil {
			stored = answer.Response
		}
		if err := json.Unmarshal(stored, &result); err != nil {
			return result, &Error{Code: "bad_result", Detail: "the stored result has another type", cause: err}
		}
		return result, nil
	}

	fence, _ := answer.Fence.Int64()
	attempt := &Attempt{Scope: scope, Key: key, Number: answer.Attempt, Fence: fence, Takeover: answer.Takeover}
	working, cancel := context.WithCancel(ctx)
	renewing, stop := context.WithCancel(context.Background())
	defer stop()
	defer cancel()
	go client.renew(renewing, renewal, answer, until, func() {
		attempt.lost.Store(true)
		cancel()
	})

	// What work came to is recorded even if the caller has gone.
	after := context.Background()
	returned := false
	defer func() {
		if !returned { // It panicked, or ended its goroutine.
			client.failed(after, named, "panic", "", "")
		}
	}()
	result, err = work(working, attempt)
	returned = true
	if err != nil {
		outcome := ""
		if options.Outcome != nil {
			outcome = options.Outcome(err)
		}
		kind := reflect.TypeOf(err).String() // such as *shop.CardDeclined
		client.failed(after, named, kind[strings.LastIndex(kind, ".")+1:], err.Error(), outcome)
		return result, err
	}
	form := "result"
	if _, ok := any(result).(Response); ok {
		form = "response"
	}
	if err := client.Call(after, "finish", named.with(form, result), nil); err != nil {
		var failed *Error
		if !errors.As(err, &failed) {
			failed = &Error{Code: "bad_result", Detail: "the result is no JSON", cause: err}
		}
		failed.Result = result
		return result, failed
	}
	return result, nil
}

// fields of a request.
type fields map[string]any

// with returns them with one more.
func (f fields) with(name string, value any) fields {
	more := fields{name: value}
	for name, value := range f {
		more[name] = value
	}
	return more
}

// NewOwner returns 24 random hex digits, which name one attempt.
func NewOwner() string {
	random := make([]byte, 12)
	if _, err := rand.Read(random); err != nil {
		panic(err) // Without randomness two attempts could have one name.
	}
	return hex.EncodeToString(random)
}

// Keys makes new keys, each beginning with app unless that is "".
func (c *Client) Keys(ctx context.Context, count int, app string) ([]string, error) {
	asked := fields{"count": count}
	if app != "" {
		asked["app"] = app
	}
	var made struct{ Keys []string }
	err := c.Call(ctx, "keys", asked, &made)
	return made.Keys, err
}

// Call sends one verb (start, renew, finish, fail, or keys), again while there is no answer, and reads
// the answer's body into answer: for a start, an *Answer. Send the owner with a start (NewOwner), so
// that a repeated one is the same attempt.
func (c *Client) Call(ctx context.Context, verb string, request, answer any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	timeout := c.Timeout
	if verb == "start" {
		timeout += longestWait
	}
	return c.call(ctx, verb, body, answer, timeout, c.Patience, func() {})
}

func (c *Client) call(ctx context.Context, verb string, body []byte, answer any,
	timeout, patience time.Duration, onSend func()) error {
	var end time.Time // from the first failure: a request may wait for longer than that
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		onSend()
		err := c.send(ctx, verb, body, answer, timeout)
		var failed *Error
		if err == nil || !errors.As(err, &failed) {
			return err
		}
		switch failed.Status {
		case 0, 429, 502, 503, 504:
		default:
			return err
		}
		delay := failed.RetryAfter
		if delay == 0 {
			delay = pause
		}
		if end.IsZero() {
			end = time.Now().Add(patience)
		}
		if time.Now().Add(delay).After(end) {
			return err
		}
		if sleep(ctx, delay) != nil {
			return ctx.Err()
		}
	}
}

// send sends a request once.
func (c *Client) send(ctx context.Context, verb string, body []byte, answer any, timeout time.Duration) error {
	timed, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(timed, "POST", c.URL+"/v1/"+verb, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	if c.Token != "" {
		request.Header.Set("Authorization", "Bearer "+c.Token)
	}
	response, err := c.HTTP.Do(request)
	var text []byte
	if err == nil {
		defer response.Body.Close()
		text, err = io.ReadAll(io.LimitReader(response.Body, 64<<20))
	}
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return &Error{Code: "unreachable", Detail: err.Error(), cause: err}
	}
	if response.StatusCode == http.StatusOK && json.Valid(text) {
		if answer == nil {
			return nil
		}
		return json.Unmarshal(text, answer)
	}
	told := struct{ Code, Detail, Field string }{"bad_answer", response.Status + ", and not an answer of semel", ""}
	_ = json.Unmarshal(text, &told) // A page of a gateway, perhaps: its status says what to do.
	seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
	return &Error{Code: told.Code, Status: response.StatusCode, Detail: told.Detail, Field: told.Field,
		RetryAfter: time.Duration(seconds) * time.Second, Problem: text}
}

// begin starts until there is an answer, and says when its lease ends.
func (c *Client) begin(ctx context.Context, named fields, options *Options) (*Answer, time.Time, error) {
	asked := named.with("wait", 0)
	if c.By != "" {
		asked["by"] = c.By
	}
	if options.Payload != nil {
		asked["payload"] = options.Payload
	}
	if options.Fingerprint != "" {
		asked["fingerprint"] = options.Fingerprint
	}
	wait := options.Wait
	if wait == 0 {
		wait = time.Minute
	}
	end := time.Now().Add(wait)
	for late := 1; ; {
		left := min(time.Until(end), longestWait)
		if left < 0 {
			left = 0
		}
		asked["wait"] = left.Seconds()
		body, err := json.Marshal(asked)
		if err != nil {
			return nil, time.Time{}, err
		}
		var answer Answer
		var sent time.Time
		err = c.call(ctx, "start", body, &answer, c.Timeout+left, c.Patience, func() { sent = time.Now() })
		if err == nil && answer.Status == "done" {
			return &answer, time.Time{}, nil
		}
		if err == nil {
			until := sent.Add(seconds(answer.Waited + answer.Lease))
			// A late answer leaves no time to work: the same owner gets a new lease.
			if time.Until(until) > seconds(answer.Lease*0.1) {
				return &answer, until, nil
			}
			if late++; late <= 3 {
				continue
			}
			err = &Error{Code: "unreachable", Detail: "answers take as long as the lease"}
		}
		var failed *Error
		if !errors.As(err, &failed) || failed.Status == 0 || failed.Status >= 500 {
			c.leave(named)
			return nil, time.Time{}, err
		}
		busy := failed.Code == "concurrent_request" || failed.Code == "wait_timeout"
		if !busy || !time.Now().Before(end) {
			return nil, time.Time{}, err
		}
		if failed.Code == "wait_timeout" && time.Since(sent) > time.Second {
			continue
		}
		if failed.RetryAfter == 0 {
			failed.RetryAfter = time.Second
		}
		if sleep(ctx, min(failed.RetryAfter, time.Until(end))) != nil {
			return nil, time.Time{}, ctx.Err()
		}
	}
}

// leave tries to free a key that may be claimed for this owner: nothing ran.
func (c *Client) leave(named fields) {
	body, _ := json.Marshal(fields{"scope": named["scope"], "key": named["key"], "owner": named["owner"],
		"outcome": "forget", "ran": false})
	_ = c.send(context.Background(), "fail", body, nil, time.Second) // The caller must not wait for it.
}

// renew renews a lease until ctx is done, and calls lose when it is lost.
func (c *Client) renew(ctx context.Context, body []byte, started *Answer, until time.Time, lose func()) {
	expiry := time.AfterFunc(time.Until(until), lose)
	defer expiry.Stop()
	every := seconds(started.RenewEvery)
	for due := until.Add(every - seconds(started.Lease)); sleep(ctx, time.Until(due)) == nil; {
		sent := time.Now()
		var renewed Answer
		err := c.send(ctx, "renew", body, &renewed, min(every+time.Second, c.Timeout))
		var failed *Error
		switch {
		case err == nil:
			every = seconds(renewed.RenewEvery)
			due = sent.Add(every)
			expiry.Reset(time.Until(sent.Add(seconds(renewed.Lease))))
		case Code(err) == "lease_lost":
			lose()
			return
		case errors.As(err, &failed) && failed.RetryAfter > 0:
			due = time.Now().Add(failed.RetryAfter)
		default:
			due = time.Now().Add(min(every/4, time.Second))
		}
	}
}

// failed records a failure. The error of the function must reach the caller: that of this does not.
func (c *Client) failed(ctx context.Context, named fields, kind, message, outcome string) {
	told := named.with("error", fields{"type": fmt.Sprintf("%.200s", kind), "message": fmt.Sprintf("%.10000s", message)})
	if outcome != "" {
		told["outcome"] = outcome
	}
	_ = c.Call(ctx, "fail", told, nil)
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func min(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}
