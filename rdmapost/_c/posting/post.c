/*
 * Posting to a queue: check, record, call the verb, take back (post.h says how).
 *
 * A post holds the queue's lock from the check until the verb returns, and no Python code runs in
 * between: a device written in Python only accepts the work requests, and runs once the lock is
 * released.
 */
#include "posting/post.h"

#include "handles/exceptions.h"
#include "parts.h"
#include "posting/build_wr.h"
#include "posting/rules.h"
#include "posting/tag_handle.h"

/* ---- the device ----------------------------------------------------------- */

static struct link *struct_of(const struct post *post, size_t index)
{
	return (void *)(post->structs + post->requests[index].at);
}

struct outcome rp_submit(const struct work_queue *q, void *object, void *records, size_t count)
{
	return q->builds ? rp_build(object, records) :
			   rp_submit_chain(q->verb, object, records, count);
}

/* ---- with the lock held -------------------------------------------------- */

uint64_t rp_room(const struct work_queue *q)
{
	const struct rp_in_flight *in_flight = q->in_flight;
	uint64_t outstanding = in_flight->posted - in_flight->done, room = RP_LOAD(&q->room);

	return room > outstanding ? room - outstanding : 0;
}

/* A list of tagged receives has its own limit; `adds` counts those that this post adds. */
static int check_tags(const struct work_queue *q, struct post *post, const struct request *r,
		      size_t *adds)
{
	struct rp_in_flight *list = q->in_flight->tagged;

	if (r->type->opcode != IBV_WR_TAG_ADD)
		return 1;
	if (q->checked && q->max_num_tags && list->posted - list->done + *adds >= q->max_num_tags)
		return rp_refuse(post, "list_full", 0);
	++*adds;
	return 1;
}

/*
 * Record the tagged receive that a TAG_ADD adds; look up the one that a TAG_DEL removes, and return
 * the low half of its cookie, or 0.
 */
static uint32_t record_tags(struct rp_in_flight *list, struct request *r, struct ibv_ops_wr *wr,
			    PyObject **refs, uint64_t *serial)
{
	struct rp_tag_handle *tag = (void *)r->tag;

	if (r->wr_id_of_tag) {
		r->tagged = rp_record(list, (struct rp_entry){ .wr_id = r->wr_id_of_tag,
							       .refs = *refs, .count = 1,
							       .state = RP_POSTED });
		tag->cookie = r->tagged;
		tag->serial = list->posted - 1;
		r->wr_id_of_tag = NULL;
		*refs = NULL;
		wr->tm.add.recv_wr_id = r->tagged;
		return 0;
	}
	if (!tag || tag->list != list)
		return 0;
	wr->tm.handle = tag->value;
	*serial = tag->serial;
	return rp_is_outstanding(list, tag->cookie, tag->serial) ? (uint32_t)tag->cookie : 0;
}

void rp_link(const struct post *post, size_t index, size_t count)
{
	const struct request *r = &post->requests[index];
	char *at = post->structs + r->at;

	struct_of(post, index)->next = index + 1 < count ? struct_of(post, index + 1) : NULL;
	if (r->num_sge)
		*(struct ibv_sge **)(void *)(at + rp_heads[r->type->verb].sg_list) = rp_sges(post, r);
	if (r->ah)
		((struct ibv_send_wr *)(void *)at)->wr.ud.ah = r->ah->address;
	if (r->mw)
		((struct ibv_send_wr *)(void *)at)->bind_mw.mw = r->mw->address;
	if (r->mr)
		((struct ibv_send_wr *)(void *)at)->bind_mw.bind_info.mr = r->mr->address;
}

static void record(struct work_queue *q, struct post *post, struct request *r)
{
	struct ibv_send_wr *wr = (void *)(post->structs + r->at);
	PyObject *wr_id = r->wr_id, *refs;
	unsigned char state = RP_POSTED, key = 0;
	uint32_t removes = 0;
	uint64_t serial = 0;

	r->wr_id = NULL;
	refs = rp_held_until_done(q, r);
	if (refs == r->refs) {
		/* Keep the window: it is needed again after the device's post returns. */
		r->refs = r->mw ? Py_NewRef(refs) : NULL;
		r->pinned = 0;
	} else if (refs) {
		Py_INCREF(refs);
		rp_pin((struct rp_handle *)refs);
	}
	if (r->mw) {
		serial = rp_bind_clock();
		post->binds = 1;
		state = post->type_1 && !wr->bind_mw.bind_info.length ? RP_UNBIND : RP_BIND;
		key = wr->bind_mw.rkey & RP_KEY_BYTE;
		removes = rp_number_bind(r->mw, key, q->in_flight->binder);
	}
	if (rp_invalidates(q, r->type)) {
		state = RP_LOCAL_INV;
		removes = wr->invalidate_rkey;
	}
	if (q->in_flight->tagged)
		removes = record_tags(q->in_flight->tagged, r, (void *)wr, &refs, &serial);
	/* Every work request begins with its wr_id. */
	wr->wr_id = r->cookie = rp_record(q->in_flight,
					  (struct rp_entry){ .wr_id = wr_id, .refs = refs,
							     .count = 1, .removes = removes,
							     .serial = serial, .state = state,
							     .key = key });
}

/*
 * Check work requests up to the first that is refused, and record those before it; returns how
 * many were recorded.
 */
static size_t record_each(struct work_queue *q, struct rp_handle *owner, struct post *post,
			  size_t count)
{
	uint64_t left = q->checked ? rp_room(q) : UINT64_MAX;
	size_t admitted = 0, adds = 0;

	for (; admitted < count; admitted++) {
		struct request *r = &post->requests[admitted];

		if (admitted == left)
			rp_refuse(post, "full", 0);
		if (admitted == left || !rp_check(q, owner, post, r) ||
		    (q->in_flight->tagged && !check_tags(q, post, r, &adds)))
			break;
	}
	for (size_t i = 0; i < admitted; i++) {
		record(q, post, &post->requests[i]);
		rp_link(post, i, admitted);
	}
	return admitted;
}

/* How many of the last `count` work requests of a prepared list share one entry. */
static size_t in_one_entry(const struct post *post, size_t count)
{
	return post->invalidates ? 1 : count;
}

/* Record a prepared list: its work requests have consecutive cookies. */
static size_t record_list(struct work_queue *q, struct post *post, PyObject *sent)
{
	size_t each = in_one_entry(post, post->count);

	for (size_t i = 0; i < post->count; i += each) {
		struct rp_entry entry = { .wr_id = rp_own_sent(sent),
					  .count = (uint32_t)each, .row = (uint32_t)i,
					  .state = RP_POSTED };
		uint64_t cookie;

		if (rp_invalidates(q, post->requests[i].type)) {
			entry.state = RP_LOCAL_INV;
			/* The key may have been changed since the last post. */
			entry.removes = ((struct ibv_send_wr *)struct_of(post, i))->invalidate_rkey;
		}
		cookie = rp_record(q->in_flight, entry);
		for (size_t j = 0; j < each; j++)
			struct_of(post, i + j)->wr_id = rp_cookie_at(cookie, j);
	}
	return post->count;
}

/* Undo a record; its references go back to the request, which releases them. */
static void take_back(struct work_queue *q, struct request *r)
{
	struct rp_entry taken = { .wr_id = NULL }, tagged = { .wr_id = NULL };

	rp_unrecord(q->in_flight, r->cookie, 1, &taken);
	if (taken.state >= RP_BIND)
		rp_take_back_bind(r->mw, taken.key, taken.removes);
	if (r->tagged)
		rp_unrecord(q->in_flight->tagged, r->tagged, 1, &tagged);
	r->wr_id = taken.wr_id;
	r->wr_id_of_tag = tagged.wr_id;
	if (!r->refs) {
		r->refs = taken.refs ? taken.refs : tagged.refs;
		r->pinned = 1;
	} else if (taken.refs) {
		rp_unpin_all(taken.refs);
		Py_DECREF(taken.refs); /* the request holds them too */
	}
}

/* Bind a window of type 1, and have the device choose its key. */
static struct outcome bind(struct rp_handle *owner, const struct post *post)
{
	const struct request *r = post->requests;
	const struct ibv_send_wr *from = (void *)post->structs;
	struct ibv_mw *mw = r->mw->address;
	struct ibv_mw_bind bind = { .wr_id = r->cookie, .send_flags = from->send_flags,
				    .bind_info = from->bind_mw.bind_info };
	uint32_t rkey = mw->rkey;
	int code = abs(rp_bind_mw(owner->address, mw, &bind));

	if (code)
		mw->rkey = rkey;
	if (code && !post->sure && code != EOPNOTSUPP && code != ENOSYS)
		return (struct outcome){ code, -1 }; /* the device may still complete it */
	return (struct outcome){ code, !code };
}

/* Undo the records of the work requests that the device did not accept, latest first. */
static void take_back_each(struct work_queue *q, struct post *post, size_t count, int64_t posted)
{
	/* If `posted` is unknown, all count as posted, so that their memory stays held. */
	while (posted >= 0 && count-- > (size_t)posted)
		take_back(q, &post->requests[count]);
}

static void take_back_list(struct work_queue *q, const struct post *post, int64_t posted)
{
	if (posted >= 0)
		rp_unrecord_rest(q->in_flight, struct_of(post, 0)->wr_id, NULL,
				 in_one_entry(post, post->count - (size_t)posted), (size_t)posted,
				 post->count);
}

/* Store windows' new keys in their structs, where drivers read the key that a bind replaces. */
static void put_keys(const struct post *post, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		const struct request *r = &post->requests[i];
		const struct ibv_send_wr *wr = (void *)(post->structs + r->at);

		if (r->mw && r->mw->address)
			rp_put_key(r->mw->address, wr->bind_mw.rkey);
	}
}

/* Store the device's numbers of the entries that TAG_ADDs have added in their handles. */
static void number_handles(const struct post *post, int64_t in)
{
	for (int64_t i = 0; i < in; i++) {
		const struct request *r = &post->requests[i];
		const struct ibv_ops_wr *op = (void *)(post->structs + r->at);

		if (r->tagged)
			((struct rp_tag_handle *)r->tag)->value = op->tm.handle;
	}
}

/* ---- without the lock ---------------------------------------------------- */

static PyObject *wrs_of(const struct post *post)
{
	return post->wrs ? Py_NewRef(post->wrs) : PyTuple_Pack(1, post->requests->wr);
}

static PyObject *posted_name, *notes_name, *handle_name;

/*
 * Say in an exception that is not a PostError (a MemoryError, a RecursionError, or a signal
 * handler's) how many work requests were posted; `posted` is -1 if that is unknown. Calls no Python
 * function: there may be no stack left.
 */
static void add_posted_note(long long posted, Py_ssize_t count)
{
	PyObject *error = rp_take_exception(), *notes, *text, *number;
	int failed = 1;

	if (PyObject_HasAttr(error, posted_name)) {
		rp_raise(error);
		return;
	}
	/* The shortage of memory may be momentary. */
	for (int i = 0; failed && i < MAX_INTERRUPTS; i++) {
		number = posted < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(posted);
		failed = !number || PyObject_SetAttr(error, posted_name, number);
		Py_XDECREF(number);
		PyErr_Clear();
	}
	if (posted < 0)
		text = count == 1 ?
			       PyUnicode_FromString("the work request may have been posted") :
			       PyUnicode_FromFormat("some of %zd work requests may have been posted",
						    count);
	else
		text = PyUnicode_FromFormat("%lld of %zd work request%s posted", posted, count,
					    count == 1	? " was" :
					    posted == 1 ? "s was" : "s were");
	notes = text ? PyObject_GetAttr(error, notes_name) : NULL;
	PyErr_Clear();
	if (text && !notes)
		notes = PyList_New(0);
	if (notes && PyList_Check(notes) && !PyList_Append(notes, text))
		PyObject_SetAttr(error, notes_name, notes);
	PyErr_Clear();
	Py_XDECREF(notes);
	Py_XDECREF(text);
	rp_raise(error);
}

/* Release the work requests, and the result of a call that should have raised. Returns NULL. */
static PyObject *raised(PyObject *done, PyObject *wrs)
{
	Py_XDECREF(done);
	Py_XDECREF(wrs);
	if (!PyErr_Occurred())
		PyErr_SetString(PyExc_SystemError, "nothing was raised");
	return NULL;
}

/* Takes over the reference to the work requests, which may be NULL. */
PyObject *rp_raise_refusal(struct work_queue *q, struct rp_handle *owner, PyObject *wrs,
			   const struct refusal *why, size_t index, Py_ssize_t posted)
{
	return raised(!wrs ? NULL : PyObject_CallMethod(
		(PyObject *)q, "_refused", "OOnnsOOKK(KII)", (PyObject *)owner, wrs,
		(Py_ssize_t)index, posted, why->rule, why->name ? why->name : Py_None,
		why->value ? why->value : Py_None, (unsigned long long)why->a,
		(unsigned long long)why->b, (unsigned long long)why->sge.addr, why->sge.length,
		why->sge.lkey), wrs);
}

void rp_raise_list_closed(const struct post *post)
{
	PyErr_Format(rp_errors.closed, "the prepared list of %zu is closed", post->count);
}

/* Set each posted TAG_ADD's handle, even if one fails; returns the first exception, or NULL. */
static PyObject *give_handles(const struct post *post, int64_t in)
{
	PyObject *first = NULL;

	for (int64_t i = 0; i < in; i++) {
		const struct request *r = &post->requests[i];

		if (!r->tagged || !PyObject_SetAttr(r->wr, handle_name, r->tag))
			continue;
		if (first)
			PyErr_Clear();
		else
			first = rp_take_exception();
	}
	return first;
}

/* Takes over the reference to the work requests. */
static PyObject *raise_failure(struct work_queue *q, struct rp_handle *owner, PyObject *wrs,
			       struct outcome outcome)
{
	return raised(!wrs ? NULL : PyObject_CallMethod((PyObject *)q, "_failed", "OOiL",
							(PyObject *)owner, wrs, outcome.code,
							(long long)outcome.posted), wrs);
}

/*
 * Check and record work requests; returns how many, or -1 with an exception. If the queue refuses
 * all of them, sets `*rule`.
 */
static inline Py_ssize_t check_and_record(struct work_queue *q, struct rp_handle *owner,
					  struct post *post, PyObject *sent, size_t count,
					  const char **rule)
{
	if (!q->ready)
		*rule = "not_ready";
	else if (rp_reserve(q->in_flight, sent && !post->invalidates ? 1 : count) ||
		 (q->in_flight->tagged && rp_reserve(q->in_flight->tagged, count)))
		return -1;
	else if (!sent)
		return (Py_ssize_t)record_each(q, owner, post, count);
	else if (q->checked && rp_room(q) < count)
		*rule = "full";
	else
		return (Py_ssize_t)record_list(q, post, sent);
	return 0;
}

PyObject *rp_answer(PyObject *result, PyObject *raised, int64_t posted, size_t count)
{
	if (raised)
		rp_raise(raised);
	if (!PyErr_Occurred())
		return Py_NewRef(result);
	if (posted)
		add_posted_note(posted, (Py_ssize_t)count);
	return NULL;
}

static PyObject *answer(PyObject *raised, const struct post *post, int64_t posted)
{
	return rp_answer(Py_None, raised, posted,
			 post->wrs ? (size_t)PyTuple_Size(post->wrs) : post->count);
}

PyObject *rp_post_list(struct work_queue *q, struct rp_handle *owner, struct post *post,
		       PyObject *const *sent)
{
	struct outcome outcome = { 0, 0 };
	const char *rule = NULL;
	PyObject *wrs = NULL;
	Py_ssize_t taken = 0;
	struct rp_posting posting;
	PyObject *raised;
	size_t index = 0;
	int open;

	if (rp_begin_post(q, owner, &posting))
		return NULL;
	open = *sent != NULL;
	if (open)
		taken = check_and_record(q, owner, post, *sent, post->count, &rule);
	if (taken > 0)
		outcome = rp_submit(q, owner->address, post->structs, post->count);
	if (rule || outcome.code) {
		/* The list may be closed before the error is raised. */
		wrs = Py_NewRef(post->wrs);
		index = rule && !strcmp(rule, "full") ? rp_room(q) : 0;
		if (outcome.code)
			take_back_list(q, post, outcome.posted);
	}
	raised = rp_run_and_end_post(q, &posting, NULL, taken > 0);
	if (taken > 0 && !outcome.code && !raised)
		Py_RETURN_NONE;
	if (outcome.code)
		raise_failure(q, owner, wrs, outcome);
	else if (rule)
		rp_raise_refusal(q, owner, wrs, &(struct refusal){ .rule = rule }, index, 0);
	else if (!open)
		rp_raise_list_closed(post);
	return answer(raised, post, outcome.posted);
}

/*
 * Setting the handles of TAG_ADDs has raised `exception`. Make it the context of the PostError that
 * is set, which says what was posted; but if it is a KeyboardInterrupt or the like, raise it, with
 * the PostError as its context.
 */
static void raise_not_taken(PyObject *exception)
{
	PyObject *refused = PyErr_GivenExceptionMatches(exception, PyExc_Exception) ?
				    rp_take_exception() : NULL;

	rp_raise(exception);
	if (refused)
		rp_raise(refused);
}

/* Steps 2 to 5. */
static PyObject *post_read(struct work_queue *q, struct rp_handle *owner, struct post *post)
{
	size_t readable = post->count - (post->refusal.rule != NULL);
	struct outcome outcome = { 0, 0 };
	const char *rule = NULL;
	PyObject *raised, *not_taken = NULL;
	struct rp_posting posting;
	Py_ssize_t taken = 0;

	if (rp_begin_post(q, owner, &posting))
		return NULL;
	if (readable)
		taken = check_and_record(q, owner, post, NULL, readable, &rule);
	if (taken > 0)
		outcome = post->type_1 ? bind(owner, post) :
					  rp_submit(q, owner->address, post->structs,
						    (size_t)taken);
	if (outcome.code)
		take_back_each(q, post, (size_t)taken, outcome.posted);
	if (post->binds)
		rp_note_binder(owner, q->in_flight->binder);
	if (post->binds && !post->type_1)
		put_keys(post, outcome.posted < 0 ? (size_t)taken : (size_t)outcome.posted);
	if (q->in_flight->tagged)
		number_handles(post, outcome.posted);
	raised = rp_run_and_end_post(q, &posting, post, taken > 0);
	if (taken < 0)
		return answer(raised, post, 0);
	if (q->in_flight->tagged)
		not_taken = give_handles(post, outcome.posted);
	if (rule)
		rp_refuse(post, rule, 0);
	if (!outcome.code && !post->refusal.rule && !raised && !not_taken)
		Py_RETURN_NONE;
	if (outcome.code)
		raise_failure(q, owner, wrs_of(post), outcome);
	else if (post->refusal.rule)
		rp_raise_refusal(q, owner, wrs_of(post), &post->refusal, (size_t)taken,
				 (Py_ssize_t)outcome.posted);
	if (not_taken)
		raise_not_taken(not_taken);
	return answer(raised, post, outcome.posted);
}

struct rp_slot rp_queue_slots[SRQ_OPS + 1];

struct work_queue *rp_queue_of(PyObject *owner, int verb)
{
	static PyObject *usual; /* the type of the first queue: PostQueue */
	const struct rp_slot *slot = &rp_queue_slots[verb];
	PyObject **at = rp_slot_at(owner, slot);
	PyObject *queue = at && *at ? Py_NewRef(*at) : PyObject_GetAttr(owner, slot->name);

	if (queue && (rp_has_type(queue, RP_LOAD(&usual)) ||
		      PyObject_TypeCheck(queue, (PyTypeObject *)rp_queue_type)) &&
	    ((struct work_queue *)queue)->in_flight) {
		if (!RP_LOAD(&usual))
			RP_STORE(&usual, Py_NewRef((PyObject *)Py_TYPE(queue)));
		return (struct work_queue *)queue;
	}
	if (queue) {
		PyErr_SetString(PyExc_TypeError, "the queue has not been initialised");
	} else if (PyErr_ExceptionMatches(PyExc_AttributeError) && rp_is_handle(owner)) {
		/* The owner's constructor has not run. */
		PyErr_Clear();
		rp_raise_closed((struct rp_handle *)owner);
	}
	Py_XDECREF(queue);
	return NULL;
}

int rp_check_owner(const struct work_queue *q, PyObject *owner)
{
	/* By name: rp_queue_of() reads a slot, which a wrong owner may not have. */
	PyObject *queue = q->in_flight ? PyObject_GetAttr(owner, rp_queue_slots[q->verb].name) : NULL;
	int owns = queue == (PyObject *)q;

	Py_XDECREF(queue);
	if (owns)
		return 0;
	PyErr_SetString(PyExc_TypeError, "the queue has not been initialised, or has another owner");
	return -1;
}

/*
 * Post a work request, or a sequence of them. The last two are as in struct post: whether
 * ibv_bind_mw() posts it.
 */
static PyObject *read_and_post(struct work_queue *q, PyObject *owner, PyObject *wrs, int type_1,
			       int sure)
{
	PyObject *answer = NULL;
	struct post post;

	if (rp_enter_call())
		return NULL;
	if (!rp_read(q, wrs, &post)) {
		post.type_1 = type_1;
		post.sure = sure;
		answer = post_read(q, (struct rp_handle *)owner, &post);
	}
	rp_free_post(&post);
	rp_leave_call();
	return answer;
}

static PyObject *post_to(PyObject *owner, int verb, PyObject *wrs)
{
	struct work_queue *q = rp_queue_of(owner, verb);
	PyObject *answer = q ? read_and_post(q, owner, wrs, 0, 0) : NULL;

	Py_XDECREF((PyObject *)q);
	return answer;
}

#define METHOD(name, verb)                                                                   \
	PyObject *name(PyObject *self, PyObject *wrs)                                        \
	{                                                                                    \
		return post_to(self, verb, wrs);                                             \
	}
METHOD(rp_post_send, SEND)
METHOD(rp_post_recv, RECV)
METHOD(rp_post_srq_recv, SRQ_RECV)
METHOD(rp_post_srq_ops, SRQ_OPS)

/* bind_mw(owner, wr, sure): bind a window of type 1. If `sure`, a failed call posts nothing. */
static PyObject *queue_bind_mw(PyObject *self, PyObject *args)
{
	struct work_queue *q = (struct work_queue *)self;
	const struct wr_type *type;
	PyObject *owner, *wr;
	int sure;

	if (!PyArg_ParseTuple(args, "O!Op", rp_handle_type, &owner, &wr, &sure))
		return NULL;
	if (rp_check_owner(q, owner))
		return NULL;
	type = rp_wr_type_of(q, Py_TYPE(wr));
	if (!type || type->verb != SEND || type->opcode != IBV_WR_BIND_MW)
		return PyErr_Format(PyExc_TypeError, "expected a BindMW");
	return read_and_post(q, owner, wr, 1, sure);
}

/* ---- the type ------------------------------------------------------------ */

static int read_wr_types(struct work_queue *q, PyObject *wr_types)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(wr_types); i++) {
		int index;
		unsigned int flags;

		if (!PyArg_ParseTuple(PyTuple_GetItem(wr_types, i), "iI", &index, &flags))
			return -1;
		if (index < 0 || index >= rp_num_wr_types) {
			PyErr_SetString(PyExc_ValueError, "no such class");
			return -1;
		}
		q->takes[index] = 1;
		q->flags[index] = flags;
	}
	return 0;
}

/* See rdmapost/posting/queue.py for the arguments. */
static int queue_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "verb", "in_flight", "checked", "pd",
				 "room", "datagram", "xrc", "binds", "builds", "max_sge",
				 "max_msg_size", "max_inline_data",
				 "max_tso_header", "max_num_tags", "wr_types",
				 NULL };
	struct work_queue *q = (struct work_queue *)self, new = { .verb = 0 };
	size_t settings = offsetof(struct work_queue, verb);
	PyObject *in_flight, *wr_types;
	uint64_t pd;

	if (!q->in_flight &&
	    (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO!pkkppppikkkkO!", names, &new.verb,
		    rp_in_flight_type, &in_flight, &new.checked, &pd, &new.room, &new.datagram,
		    &new.xrc, &new.binds, &new.builds, &new.max_sge, &new.max_msg_size,
		    &new.max_inline_data, &new.max_tso_header, &new.max_num_tags, &PyTuple_Type,
		    &wr_types) ||
	     read_wr_types(&new, wr_types)))
		return -1;
	/* Reading the arguments may have run code that initialised the queue. */
	if (q->in_flight) {
		PyErr_SetString(PyExc_TypeError, "it has already been initialised");
		return -1;
	}
	if (new.verb < SEND || new.verb > SRQ_OPS) {
		PyErr_SetString(PyExc_ValueError, "there is no such verb");
		return -1;
	}
	if (rp_init_lock(&q->lock))
		return -1;
	new.pd = (void *)(uintptr_t)pd;
	/* All members from `verb` on come from the arguments, or begin as 0. */
	memcpy((char *)q + settings, (char *)&new + settings, sizeof(new) - settings);
	q->in_flight = (struct rp_in_flight *)Py_NewRef(in_flight);
	return 0;
}

static int queue_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)((struct work_queue *)self)->in_flight);
	return 0;
}

static void queue_dealloc(PyObject *self)
{
	struct work_queue *q = (struct work_queue *)self;

	PyObject_GC_UnTrack(self);
	Py_XDECREF((PyObject *)q->in_flight);
	rp_free_lock(&q->lock);
	rp_free(self);
}

/*
 * set_ready(ready, resets={}): set whether the queue's state accepts work requests. The queue
 * accepts none while the dict contains a reset, because the reset would drop them.
 */
static PyObject *queue_set_ready(PyObject *self, PyObject *args)
{
	PyObject *resets = NULL;
	int ready;

	if (!PyArg_ParseTuple(args, "p|O!", &ready, &PyDict_Type, &resets))
		return NULL;
	/* No other thread can begin a reset between reading the dict and setting `ready`. */
	((struct work_queue *)self)->ready = ready && !(resets && PyDict_Size(resets));
	Py_RETURN_NONE;
}

/* set_room(room): how many work requests may be outstanding from now on. */
static PyObject *queue_set_room(PyObject *self, PyObject *room)
{
	uint64_t now = PyLong_AsUnsignedLongLong(room);

	if (PyErr_Occurred())
		return NULL;
	RP_STORE(&((struct work_queue *)self)->room, now);
	Py_RETURN_NONE;
}

static PyMethodDef queue_methods[] = {
	{ "bind_mw", queue_bind_mw, METH_VARARGS, NULL },
	{ "set_ready", queue_set_ready, METH_VARARGS, NULL },
	{ "set_room", queue_set_room, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot queue_slots[] = {
	{ Py_tp_init, queue_init },
	{ Py_tp_dealloc, queue_dealloc },
	{ Py_tp_traverse, queue_traverse },
	{ Py_tp_methods, queue_methods },
	{ 0, NULL },
};

PyObject *rp_queue_type;

int rp_add_queue(PyObject *module)
{
	posted_name = PyUnicode_InternFromString("posted"); /* never released */
	notes_name = PyUnicode_InternFromString("__notes__"); /* never released */
	handle_name = PyUnicode_InternFromString("handle"); /* never released */
	return !posted_name || !notes_name || !handle_name ||
	       rp_add_type(module, "rdmapost._verbs.Queue", sizeof(struct work_queue),
			   Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, queue_slots, &rp_queue_type) ?
		       -1 : 0;
}
